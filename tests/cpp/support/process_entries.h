// What this process holds, as /proc counts it: its threads and descriptors.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <thread>

#include "tests/cpp/support/check.h"

namespace pycoll::testing {

inline constexpr const char* kTaskFolder = "/proc/self/task";
inline constexpr const char* kDescriptorFolder = "/proc/self/fd";

inline std::size_t entries(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

// Fails unless at most so many threads are left. A thread that was joined leaves /proc a moment
// later, also one that a case before this one joined.
inline void await_threads(std::size_t expected) {
  for (int look = 0; look < 10'000 && entries(kTaskFolder) > expected; ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::size_t left = entries(kTaskFolder);
  CHECK(left <= expected, "%zu threads, expected %zu", left, expected);
}

}  // namespace pycoll::testing
