// The handle of an operation that may still run; a Work in Python holds one.
#pragma once

#include <atomic>
#include <utility>

#include "base/clock.h"
#include "base/status.h"
#include "executor/call_arrays.h"

namespace pycoll::engine {

// Threads: the engine's driver finishes it once; any thread may ask. status() may be read only
// after done() has returned true, and never changes afterwards.
class Operation {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }

  // When it ended, by SteadyClock; 0 unless ends were recorded at that time. Read it as status().
  Nanoseconds ended() const { return ended_; }
  // Sets whether operations record the time at which they end, for timelines.
  static void record_ends(bool record) { recording.store(record, std::memory_order_relaxed); }

  void finish(Status status) {
    status_ = std::move(status);
    if (recording.load(std::memory_order_relaxed)) ended_ = SteadyClock().now();
    done_.store(true, std::memory_order_release);  // pairs with the load in done()
  }

  // Resets it to the initial state. Requires: nothing else refers to it.
  void reset() {
    status_ = Status();
    ended_ = 0;
    done_.store(false, std::memory_order_relaxed);
    arrays_ = nullptr;
  }

  // The arrays of the list or group to which the operation belongs; nullptr: those of its request.
  // They outlive the operation. Set them before it starts.
  const executor::CallArrays* arrays() const { return arrays_; }
  void belongs_to(const executor::CallArrays* arrays) { arrays_ = arrays; }

 private:
  static inline std::atomic<bool> recording{false};

  Status status_;
  Nanoseconds ended_ = 0;
  std::atomic<bool> done_{false};
  const executor::CallArrays* arrays_ = nullptr;
};

}  // namespace pycoll::engine
