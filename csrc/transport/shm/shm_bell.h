// The wake-up of a sleeping peer on shared memory.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "transport/shm/shm_layout.h"

namespace pycoll::transport::shm {

// Publishes words to one peer and wakes it if it sleeps.
//
// The sleeper first makes its epoch odd and then looks for news. The publisher first stores the
// news and then looks at the epoch. At least one of the two must see the other's store, so both
// sides need a full barrier. A sleeper with Identity::barriers_when_arming makes the kernel execute
// a barrier on every processor (membarrier), so that the far more frequent publisher needs none.
// Otherwise the publisher's store is the barrier (`fenced`).
class Bell {
 public:
  // `peer_sleep` outlives the bell. The caller keeps `doorbell` open. `fenced`: see above.
  Bell(const Sleep* peer_sleep, int doorbell, bool fenced)
      : peer_sleep_(peer_sleep), doorbell_(doorbell), fenced_(fenced) {}

  void publish(std::uint64_t& word, std::uint64_t value) {
    store(word, value);
    ring();
  }

  // For news that the peer wants only while `wanted` contains one of `bits`. The peer sets the bits
  // before it sleeps.
  void publish_if_wanted(std::uint64_t& word, std::uint64_t value, const std::uint64_t& wanted,
                         std::uint64_t bits) {
    store(word, value);
    const std::uint64_t epoch = load_ordered(peer_sleep_->epoch);
    if (__builtin_expect((epoch & 1) != 0, 0) && (load_acquire(wanted) & bits) != 0) wake(epoch);
  }

  // Wakes the peer for news that the caller has published by store_ordered.
  void ring() {
    const std::uint64_t epoch = load_ordered(peer_sleep_->epoch);
    if (__builtin_expect((epoch & 1) != 0, 0)) wake(epoch);
  }

 private:
  void store(std::uint64_t& word, std::uint64_t value) const {
    if (fenced_) {
      store_ordered(word, value);  // pairs with store_ordered(epoch) in ShmTransport::arm
    } else {
      store_release(word, value);
      std::atomic_signal_fence(std::memory_order_seq_cst);  // pairs with membarrier in arm
    }
  }

  // Writes once per sleep: the doorbell stays readable until the sleeper reads it in disarm().
  void wake(std::uint64_t epoch) {
    if (epoch == woken_epoch_) return;
    woken_epoch_ = epoch;
    const std::uint64_t one = 1;
    // The write fails only if the counter is full, and then the doorbell is readable anyway.
    (void)!::write(doorbell_, &one, sizeof(one));
  }

  const Sleep* peer_sleep_;
  std::uint64_t woken_epoch_ = 0;
  int doorbell_;
  bool fenced_;
};

}  // namespace pycoll::transport::shm
