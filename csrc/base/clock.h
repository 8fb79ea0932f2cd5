// The clock of the engines. It is injected, so that the simulator can control time.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>

namespace pycoll {

using Nanoseconds = std::int64_t;
inline constexpr Nanoseconds kForever = std::numeric_limits<Nanoseconds>::max();

// start + duration, or kForever if the sum exceeds it. Requires: start >= 0.
constexpr Nanoseconds later(Nanoseconds start, Nanoseconds duration) {
  return duration > kForever - start ? kForever : start + duration;
}

// Threads: any thread may call now().
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic time in nanoseconds. The origin is arbitrary, so only differences have a meaning.
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
