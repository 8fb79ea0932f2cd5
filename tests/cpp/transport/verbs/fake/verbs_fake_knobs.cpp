// What tests can do to the fake provider, and ask it.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>

#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/verbs/fake/verbs_fake_network.h"

namespace pycoll::testing {

FakeVerbs::FakeVerbs(const FakeOptions& options)
    : network_(std::make_unique<FakeNetwork>(options)) {}
FakeVerbs::~FakeVerbs() = default;
void FakeVerbs::cut(int device) {
  const auto held = network_->lock();
  network_->cut.insert(device);
}

void FakeVerbs::break_sends(int device) {
  const auto held = network_->lock();
  network_->broken.insert(device);
}

void FakeVerbs::tell_port_error(int device, int port) {
  const auto held = network_->lock();
  for (FakeContext* context : network_->contexts) {
    if (context->device != device) continue;
    context->events.emplace_back(IBV_EVENT_PORT_ERR, port);
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

FakeCards FakeCards::of(void* library) {
  const auto get = [&]<typename Function>(const char* name, Function*& entry) {
    entry = reinterpret_cast<Function*>(::dlsym(library, name));
    CHECK(entry != nullptr, "no %s there", name);
  };
  FakeCards made{};
  get("pycoll_fake_device_of_descriptor", made.device_of_descriptor);
  get("pycoll_fake_device_of_address", made.device_of_address);
  get("pycoll_fake_registers_addresses", made.registers_addresses);
  get("pycoll_fake_card_write", made.write);
  get("pycoll_fake_card_settle", made.settle);
  return made;
}

void FakeVerbs::reach(const FakeCards& cards) {
  const auto held = network_->lock();
  network_->cards = cards;
}

void FakeVerbs::refuse_dmabufs(int device) {
  const auto held = network_->lock();
  network_->without_dmabufs.insert(device);
}

void FakeVerbs::rewrite(std::uint32_t from, std::uint32_t to) {
  const auto held = network_->lock();
  network_->rewritten[htonl(from)] = htonl(to);
}

void FakeVerbs::stall(int device, bool stall) {
  const auto held = network_->lock();
  if (stall) {
    network_->stalled.insert(device);
  } else {
    network_->stalled.erase(device);
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

std::uint64_t FakeVerbs::directly_written_bytes() const {
  const auto held = network_->lock();
  return network_->directly_written_bytes;
}

std::uint64_t FakeVerbs::hosts_bytes() const {
  const auto held = network_->lock();
  return network_->hosts_bytes;
}

std::uint64_t FakeVerbs::taken_bytes() const {
  const auto held = network_->lock();
  return network_->taken_bytes;
}

std::uint64_t FakeVerbs::sent_over(int device, int port) const {
  const auto held = network_->lock();
  const auto found = network_->sent_over.find({device, port});
  return found == network_->sent_over.end() ? 0 : found->second;
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
