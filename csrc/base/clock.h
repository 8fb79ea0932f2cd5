// Time as the engines see it. The clock is injected so that the simulator can own it.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>

namespace pycoll {

using Nanoseconds = std::int64_t;
inline constexpr Nanoseconds kForever = std::numeric_limits<Nanoseconds>::max();

// `duration` after `start`; kForever if that is beyond it. Requires: start >= 0.
constexpr Nanoseconds later(Nanoseconds start, Nanoseconds duration) {
  return duration > kForever - start ? kForever : start + duration;
}

// Threads: now() may be called from any thread.
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic; only differences mean anything.
  virtual Nanoseconds now() = 0;
};

class SteadyClock final : public Clock {
 public:
  Nanoseconds now() override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace pycoll
