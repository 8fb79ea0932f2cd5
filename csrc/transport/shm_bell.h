// How a rank on shared memory wakes a peer that sleeps.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "transport/shm_layout.h"

namespace pycoll::transport::shm {

// Publishes words to one peer and wakes it if it sleeps.
//
// A sleeper first marks its epoch odd and then looks for news; a publisher first stores the news
// and then looks at the epoch. One of the two must see the other's store, which needs a full
// barrier on both sides. A sleeper that barriers_when_arming makes the kernel run one on every
// processor, so that the publisher, far more frequent, pays nothing; otherwise the publisher's
// store is the barrier.
class Bell {
 public:
  // `peer_sleep` outlives the bell; `doorbell` stays the caller's. `fenced`: see above.
  Bell(const Sleep* peer_sleep, int doorbell, bool fenced)
      : peer_sleep_(peer_sleep), doorbell_(doorbell), fenced_(fenced) {}

  void publish(std::uint64_t& word, std::uint64_t value) {
    store(word, value);
    ring();
  }

  // For news that concerns the peer only if `wanted` has one of `bits`; it sets them before it
  // sleeps.
  void publish_if_wanted(std::uint64_t& word, std::uint64_t value, const std::uint64_t& wanted,
                         std::uint64_t bits) {
    store(word, value);
    const std::uint64_t epoch = load_ordered(peer_sleep_->epoch);
    if (__builtin_expect((epoch & 1) != 0, 0) && (load_acquire(wanted) & bits) != 0) wake(epoch);
  }

  // Wakes the peer for what was published before by store_ordered.
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

  // Once per sleep: the doorbell stays readable until the sleeper is up again.
  void wake(std::uint64_t epoch) {
    if (epoch == woken_epoch_) return;
    woken_epoch_ = epoch;
    const std::uint64_t one = 1;
    // Fails only if the counter is full, and then the doorbell is readable anyway.
    (void)!::write(doorbell_, &one, sizeof(one));
  }

  const Sleep* peer_sleep_;
  std::uint64_t woken_epoch_ = 0;
  int doorbell_;
  bool fenced_;
};

}  // namespace pycoll::transport::shm
