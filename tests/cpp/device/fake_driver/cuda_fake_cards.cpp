#include "tests/cpp/device/fake_driver/cuda_fake_cards.h"

#include <cstring>
#include <utility>

#include "tests/cpp/device/fake_driver/cuda_fake_api.h"

namespace pycoll::testing::fake {

Cards& Cards::get() {
  static Cards* const all = new Cards;  // cards of other threads may write until the end
  return *all;
}

Cards::Cards() : prng_(setting("FAKE_CUDA_SEED", 1)) {
  settings_.dma_buf = setting("FAKE_CUDA_DMABUF", 1) != 0;
  settings_.keeps = setting("FAKE_CUDA_CARD_ORDER", 0) != 0;
  settings_.flushes = setting("FAKE_CUDA_CARD_FLUSH", 1) != 0;
  settings_.corrupts = setting("FAKE_CUDA_CARD_CORRUPT", 0) != 0;
  settings_.addresses = setting("FAKE_CUDA_PEERMEM", 0) != 0;
}

CardSettings Cards::settings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settings_;
}

void Cards::set(const CardSettings& settings) {
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_ = settings;
}

void Cards::write(int device, void* to, const void* from, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* first = static_cast<const std::byte*>(from);
  late_.push_back({device, to, {first, first + bytes}});
  if (settings_.corrupts) late_.back().content[prng_.below(bytes)] ^= std::byte{0x40};
  if (settings_.keeps || prng_.chance(1, 3)) arrive(late_.size() - 1);
  if (!late_.empty() && prng_.chance(1, 3)) arrive(prng_.below(late_.size()));
}

void Cards::arrive(std::size_t which) {
  const Write& one = late_[which];
  std::memcpy(one.to, one.content.data(), one.content.size());
  std::swap(late_[which], late_.back());
  late_.pop_back();
}

void Cards::settle(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t i = late_.size(); i-- > 0;) {
    if (late_[i].device == device) arrive(i);
  }
}

void Cards::flush(int device) {
  if (!settings().forgets) settle(device);
}

// --- the driver

EXPORT int cuMemGetHandleForAddressRange(void* handle, Address address, std::size_t bytes, int type,
                                         std::uint64_t flags) {
  BEGIN_IN_CONTEXT();
  Address base = 0;
  const Allocation* found = machine.find(address, bytes, &base);
  if (type != device::kRangeDmaBuf || flags != 0 || found == nullptr) return kInvalidValue;
  if (address % 4096 != 0 || bytes % 4096 != 0) return kInvalidValue;
  if (!Cards::get().settings().dma_buf || found->host || found->fd < 0) return kNotSupported;
  if (address != base) return kNotSupported;  // a memfd begins where its memory does
  const int made = ::dup(found->fd);
  std::memcpy(handle, &made, sizeof(made));
  return made < 0 ? kOutOfMemory : kSuccess;
}

EXPORT int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  BEGIN_IN_CONTEXT();
  if (target != 0 || scope != device::kCardOrderOwner) return kInvalidValue;
  if (!Cards::get().settings().flushes) return kNotSupported;
  Cards::get().flush(device.ordinal);
  return kSuccess;
}

// --- cards

// Of a dma-buf; -1: it is none of this driver.
EXPORT int pycoll_fake_device_of_descriptor(int descriptor) {
  return device_of(descriptor, "device");
}

// -1: it is memory of the host.
EXPORT int pycoll_fake_device_of_address(const void* address, std::size_t bytes) {
  Machine& machine = Machine::get();
  const auto held = machine.lock();
  const Allocation* found = machine.find(reinterpret_cast<Address>(address), bytes);
  return found == nullptr || found->host ? -1 : found->device;
}

EXPORT int pycoll_fake_registers_addresses() { return Cards::get().settings().addresses ? 1 : 0; }

EXPORT void pycoll_fake_card_write(int device, void* to, const void* from, std::size_t bytes) {
  Cards::get().write(device, to, from, bytes);
}

EXPORT void pycoll_fake_card_settle(int device) { Cards::get().settle(device); }

// See CardSettings.
EXPORT void pycoll_fake_set_cards(bool dma_buf, bool keeps, bool flushes, bool addresses,
                                  bool forgets, bool corrupts) {
  Cards::get().set({dma_buf, keeps, flushes, addresses, forgets, corrupts});
}

}  // namespace pycoll::testing::fake
