// Network cards that reach the memory of the fake driver's devices, as the fake provider of verbs
// is one (verbs_fake.h). What a card writes lies in its hands until somebody flushes it, or comes
// there earlier, in any order: so it may reach the device after what the host was told of, and the
// longer after, the fewer look. Devices that keep order have it at once.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "base/prng.h"

namespace pycoll::testing::fake {

struct CardSettings {
  bool dma_buf = true;     // FAKE_CUDA_DMABUF=0: the driver exports none
  bool keeps = false;      // FAKE_CUDA_CARD_ORDER=1: the device keeps writes in order
  bool flushes = true;     // FAKE_CUDA_CARD_FLUSH=0: the host cannot flush them
  bool addresses = false;  // FAKE_CUDA_PEERMEM=1: cards register memory by its address
  bool forgets = false;    // a flush does nothing
  bool corrupts = false;   // FAKE_CUDA_CARD_CORRUPT=1: what cards write arrives wrong
};

// Threads: any. Has a lock of its own, behind which nothing else is locked.
class Cards {
 public:
  static Cards& get();

  CardSettings settings() const;
  void set(const CardSettings& settings);
  void write(int device, void* to, const void* from, std::size_t bytes);
  // All that was written to the device is there.
  void settle(int device);
  void flush(int device);

 private:
  struct Write {
    int device;
    void* to;
    std::vector<std::byte> content;
  };

  Cards();
  void arrive(std::size_t which);

  mutable std::mutex mutex_;
  CardSettings settings_;
  Prng prng_;
  std::vector<Write> late_;
};

// Of FAKE_CUDA_..., or `otherwise`; cuda_fake.cpp.
std::uint64_t setting(const char* name, std::uint64_t otherwise);

}  // namespace pycoll::testing::fake
