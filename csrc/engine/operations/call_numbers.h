// The order in which a rank has called its operations: the sequence numbers of collectives, and the
// count of operations on the device stream. All ranks call both in the same order.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/operations/numbers.h"

namespace pycoll::engine {

// Numbers of collectives are assigned by one thread at a time. Any thread may read, and may count
// operations on the device stream.
class CallNumbers {
 public:
  // The number of the collective that starts now.
  std::uint64_t next() {
    const std::uint64_t last = newest();
    const std::uint64_t number = parts_ == Parts::kMore ? last + 1 : next_call(last);
    if (parts_ == Parts::kFirst) parts_ = Parts::kMore;
    started_.store(number, std::memory_order_relaxed);
    return number;
  }
  // Skips a collective that this rank refuses. Returns the numbers of all parts of its call that
  // have not started.
  Numbers skip_call() {
    const std::uint64_t first = next();
    const std::uint64_t last = next_call(first) - 1;
    started_.store(last, std::memory_order_relaxed);
    return {first, last};
  }
  // The number that was assigned last.
  std::uint64_t newest() const { return started_.load(std::memory_order_relaxed); }

  // Collectives that start until end_call() are parts of one call. A rank that refuses one of them
  // skips the later ones. A nested call belongs to the outer call.
  void begin_call() {
    if (calls_open_++ == 0) parts_ = Parts::kFirst;
  }
  void end_call() {
    if (--calls_open_ == 0) parts_ = Parts::kNone;
  }

  // Counts an operation on the device stream. `replayable`: it may run again without a call, so
  // from now on counts are not compared.
  void count_on_stream(bool replayable) {
    std::uint64_t count = on_stream();
    while (count != kUncounted &&
           !on_stream_.compare_exchange_weak(count, replayable ? kUncounted : count + 1,
                                             std::memory_order_relaxed)) {
    }
  }
  // Operations called on the device stream, or kUncounted.
  std::uint64_t on_stream() const { return on_stream_.load(std::memory_order_relaxed); }

  // Changes whenever an operation is started or refused, on the host or on the device stream.
  std::uint64_t calls() const {
    const std::uint64_t on_streams = on_stream();
    return newest() + (on_streams == kUncounted ? 0 : on_streams);
  }

 private:
  enum class Parts : std::uint8_t { kNone, kFirst, kMore };

  std::atomic<std::uint64_t> started_{0};
  std::atomic<std::uint64_t> on_stream_{0};
  Parts parts_ = Parts::kNone;
  int calls_open_ = 0;
};

}  // namespace pycoll::engine
