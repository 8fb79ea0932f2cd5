// What tests can do to the fake provider, and ask it.
#include <unistd.h>

#include <cerrno>

#include "check.h"
#include "verbs_fake_network.h"

namespace pycoll::testing {

FakeVerbs::FakeVerbs(const FakeOptions& options)
    : network_(std::make_unique<FakeNetwork>(options)) {}
FakeVerbs::~FakeVerbs() = default;
void FakeVerbs::cut(int device) {
  const auto held = network_->lock();
  network_->cut.insert(device);
}

void FakeVerbs::tell_port_error(int device) {
  const auto held = network_->lock();
  for (FakeContext* context : network_->contexts) {
    if (context->device != device) continue;
    context->events.push_back(IBV_EVENT_PORT_ERR);
    const std::uint64_t one = 1;
    CHECK(::write(context->handle.async_fd, &one, sizeof(one)) == sizeof(one), "no event");
  }
}

void FakeVerbs::refuse_memory(int error, std::size_t beyond) {
  const auto held = network_->lock();
  network_->memory_error = error;
  network_->memory_max = network_->registered_bytes + beyond;
}

void FakeVerbs::hold_completions(int device, bool hold) {
  const auto held = network_->lock();
  if (hold) {
    network_->holding.insert(device);
  } else {
    network_->holding.erase(device);
  }
  network_->wake();
}

void FakeVerbs::copy_at_fork(bool copy) {
  const auto held = network_->lock();
  network_->copies_at_fork = copy;
}

int FakeVerbs::refusals() const {
  const auto held = network_->lock();
  return network_->refusals;
}
std::size_t FakeVerbs::registered_bytes() const {
  const auto held = network_->lock();
  return network_->registered_bytes;
}
std::uint64_t FakeVerbs::sent_from(const std::byte* begin, std::size_t bytes) const {
  const auto held = network_->lock();
  std::uint64_t total = 0;
  for (const auto& [address, sent] : network_->sent) {
    if (address >= begin && address < begin + bytes) total += sent;
  }
  return total;
}
std::uint64_t FakeVerbs::sent_bytes() const {
  const auto held = network_->lock();
  std::uint64_t total = 0;
  for (const auto& [address, sent] : network_->sent) total += sent;
  return total;
}

std::uint64_t FakeVerbs::messages() const {
  const auto held = network_->lock();
  return network_->messages;
}
std::uint64_t FakeVerbs::disordered() const {
  const auto held = network_->lock();
  return network_->disordered;
}

}  // namespace pycoll::testing
