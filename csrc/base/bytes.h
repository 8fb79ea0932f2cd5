// Arithmetic with element counts, bytes and parts. All layers convert between them here only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pycoll {

struct Range {
  std::uint64_t offset;  // in elements
  std::uint64_t length;  // in elements
};

constexpr std::uint64_t div_ceil(std::uint64_t value, std::uint64_t divisor) {
  return value / divisor + (value % divisor != 0);
}

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Part `index` of `count` elements that are cut into `parts`. Sizes differ by at most one, and
// parts of low index are larger. Requires: parts > 0, index < parts. schedule/language.py and the
// Python API use the same rule.
constexpr Range partition(std::uint64_t count, std::uint64_t parts, std::uint64_t index) {
  const std::uint64_t base = count / parts;
  const std::uint64_t extra = count % parts;
  return {index * base + (index < extra ? index : extra), base + (index < extra ? 1 : 0)};
}

// Returns false and leaves *product unchanged if the product overflows.
[[nodiscard]] inline bool checked_mul(std::uint64_t a, std::uint64_t b, std::uint64_t* product) {
  std::uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return false;
  *product = result;
  return true;
}

// FNV-1a over bytes, continued from `hash`. For comparisons between ranks, not for security.
inline constexpr std::uint64_t kHashSeed = 0xcbf29ce484222325ULL;
inline std::uint64_t hash_bytes(const void* data, std::size_t bytes,
                                std::uint64_t hash = kHashSeed) {
  const auto* cursor = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ cursor[i]) * 0x100000001b3ULL;
  return hash;
}

}  // namespace pycoll
