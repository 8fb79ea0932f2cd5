// The handle of an operation that may still run: what a Work in Python holds.
#pragma once

#include <atomic>
#include <utility>

#include "base/status.h"

namespace pycoll::runtime {

// Threads: the engine's driver finishes it once; any thread may ask. status() may be read only
// after done() said true, and never changes afterwards.
class Operation {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }

  void finish(Status status) {
    status_ = std::move(status);
    done_.store(true, std::memory_order_release);  // pairs with the load in done()
  }

  // As if new. Requires: nobody else knows of it any more.
  void reset() {
    status_ = Status();
    done_.store(false, std::memory_order_relaxed);
  }

 private:
  Status status_;
  std::atomic<bool> done_{false};
};

}  // namespace pycoll::runtime
