// Converts small float types to float32 and back, one value at a time. Decoding is exact; encoding
// rounds to nearest with ties to even. Subnormals are kept, NaN becomes the canonical quiet NaN
// (see reduce.h), and overflow gives infinity or, in a type without infinity, NaN. This code
// favours clarity over speed. The vector kernels are compiled for other instruction sets, have
// their own conversions and are tested against these.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace pycoll::kernels {

// A type of one sign bit, `exponent_bits` and `mantissa_bits`. Without infinity (the "fn" variants)
// the top exponent holds ordinary values, except for the all-ones pattern, which is NaN.
template <typename StorageType, int exponent_bits, int mantissa_bits, bool has_infinity>
struct SmallFloat {
  using Storage = StorageType;

  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr std::uint32_t kHidden = 1u << mantissa_bits;
  static constexpr std::uint32_t kMagnitude = (1u << (exponent_bits + mantissa_bits)) - 1;
  static constexpr std::uint32_t kTopExponent = kMagnitude & ~(kHidden - 1);
  static constexpr std::uint32_t kLargest = has_infinity ? kTopExponent - 1 : kMagnitude - 1;
  static constexpr std::uint32_t kNan = has_infinity ? kTopExponent | kHidden / 2 : kMagnitude;

  static float decode(Storage stored) {
    const std::uint32_t magnitude = stored & kMagnitude;
    const bool negative = (stored & ~kMagnitude) != 0;
    float value = 0;
    if (magnitude <= kLargest) {
      const int exponent = static_cast<int>(magnitude >> mantissa_bits);
      const std::uint32_t mantissa = magnitude & (kHidden - 1);
      const int significand = static_cast<int>(exponent == 0 ? mantissa : mantissa | kHidden);
      const int scale = (exponent == 0 ? 1 : exponent) - kBias - mantissa_bits;
      value = std::ldexp(static_cast<float>(significand), scale);
    } else if (has_infinity && magnitude == kTopExponent) {
      value = std::numeric_limits<float>::infinity();
    } else {
      return std::numeric_limits<float>::quiet_NaN();
    }
    return negative ? -value : value;
  }

  static Storage encode(float value) {
    if (std::isnan(value)) return static_cast<Storage>(kNan);
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 31 << (exponent_bits + mantissa_bits);
    const std::uint32_t magnitude = std::isinf(value) ? kLargest + 1 : round(bits & 0x7fffffffu);
    if (magnitude <= kLargest) return static_cast<Storage>(sign | magnitude);
    return static_cast<Storage>(has_infinity ? sign | kTopExponent : kNan);
  }

 private:
  // The magnitude nearest to a finite float32 that is given by its bits; above kLargest on
  // overflow.
  static std::uint32_t round(std::uint32_t bits) {
    // value = significand * 2^(exponent - 23)
    const bool subnormal = bits >> 23 == 0;
    const int exponent = subnormal ? -126 : static_cast<int>(bits >> 23) - 127;
    const std::uint32_t significand = (bits & 0x7fffffu) | (subnormal ? 0u : 0x800000u);
    const int lowest = 1 - kBias;
    const int target = exponent > lowest ? exponent : lowest;
    const int shift = (target - mantissa_bits) - (exponent - 23);
    if (shift > 24) return 0;  // less than half of the smallest subnormal
    const std::uint32_t half = 1u << (shift - 1);
    const std::uint32_t rest = significand & (2 * half - 1);
    const std::uint32_t whole = significand >> shift;
    const std::uint32_t up = rest > half || (rest == half && (whole & 1u) != 0) ? 1u : 0u;
    // A carry out of the mantissa increments the exponent, which is the correct result.
    return (static_cast<std::uint32_t>(target + kBias - 1) << mantissa_bits) + whole + up;
  }
};

using Float16 = SmallFloat<std::uint16_t, 5, 10, true>;
using BFloat16 = SmallFloat<std::uint16_t, 8, 7, true>;
using Float8E4M3 = SmallFloat<std::uint8_t, 4, 3, false>;
using Float8E5M2 = SmallFloat<std::uint8_t, 5, 2, true>;

}  // namespace pycoll::kernels
