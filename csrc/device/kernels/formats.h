// Device code: element types as kernels see them, Storage in memory and Value for arithmetic. The
// meaning is that of kernels/reduce.h to the bit. kernels/convert.h is the oracle against which
// tests compare all patterns of the small floats.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "device/kernels/pack.h"

namespace pycoll::device {

template <typename T>
PYCOLL_DEVICE bool is_nan(T value) {
  return value != value;
}

template <typename T>
PYCOLL_DEVICE T quiet_nan() {
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(std::uint32_t{0x7fc00000});
  } else {
    return std::bit_cast<T>(std::uint64_t{0x7ff8000000000000});
  }
}

template <typename T>
PYCOLL_DEVICE bool sign_bit(T value) {
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<std::uint32_t>(value) >> 31 != 0;
  } else {
    return std::bit_cast<std::uint64_t>(value) >> 63 != 0;
  }
}

template <typename T>
struct Integer {
  using Storage = T;
  using Value = T;
  PYCOLL_DEVICE static Value decode(Storage stored) { return stored; }
  PYCOLL_DEVICE static Storage encode(Value value) { return value; }
};

template <typename T>
struct Real {
  using Storage = T;
  using Value = T;
  PYCOLL_DEVICE static Value decode(Storage stored) { return stored; }
  PYCOLL_DEVICE static Storage encode(Value value) {
    return is_nan(value) ? quiet_nan<T>() : value;
  }
};

template <typename T>
struct Pair {
  T real;
  T imaginary;
};

template <typename T>
struct Complex {
  using Storage = Pair<T>;
  using Value = Pair<T>;
  PYCOLL_DEVICE static Value decode(Storage stored) { return stored; }
  PYCOLL_DEVICE static Storage encode(Value value) {
    return {Real<T>::encode(value.real), Real<T>::encode(value.imaginary)};
  }
};

// A float of 8 or 16 bits, whose arithmetic is done in float32. Both conversions use float32
// arithmetic that is exact or rounds to nearest even, so subnormals need no loop.
template <typename StorageType, int exponent_bits, int mantissa_bits, bool has_infinity>
struct SmallFloat {
  using Storage = StorageType;
  using Value = float;

  static constexpr std::uint32_t kBias = (1u << (exponent_bits - 1)) - 1;
  static constexpr std::uint32_t kShift = 23 - mantissa_bits;
  static constexpr std::uint32_t kHidden = 1u << mantissa_bits;
  static constexpr std::uint32_t kMagnitude = (1u << (exponent_bits + mantissa_bits)) - 1;
  static constexpr std::uint32_t kTopExponent = kMagnitude & ~(kHidden - 1);
  static constexpr std::uint32_t kLargest = has_infinity ? kTopExponent - 1 : kMagnitude - 1;
  static constexpr std::uint32_t kNan = has_infinity ? kTopExponent | kHidden / 2 : kMagnitude;
  // From this type's exponent bias to that of float32.
  static constexpr std::uint32_t kRebias = (127 - kBias) << 23;
  // The exponent bits of a float32 whose last bit is worth this type's smallest number.
  static constexpr std::uint32_t kSubnormal = kRebias + ((kShift + 1) << 23);

  PYCOLL_DEVICE static float decode(Storage stored) {
    const std::uint32_t magnitude = stored & kMagnitude;
    const std::uint32_t sign = static_cast<std::uint32_t>(stored & ~kMagnitude)
                               << (31 - exponent_bits - mantissa_bits);
    std::uint32_t bits = 0;
    if (magnitude > kLargest) {
      bits = has_infinity && magnitude == kTopExponent ? 0x7f800000u : 0x7fc00000u;
    } else if constexpr (kRebias == 0) {
      bits = magnitude << kShift;
    } else {
      // `magnitude` is a subnormal float32, too, until the product corrects its exponent.
      const float scale = std::bit_cast<float>((254 - kBias) << 23);
      bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << kShift) * scale);
    }
    return std::bit_cast<float>(sign | bits);
  }

  PYCOLL_DEVICE static Storage encode(float value) {
    const auto all = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t bits = all & 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<Storage>(kNan);
    const std::uint32_t sign = all >> 31 << (exponent_bits + mantissa_bits);
    std::uint32_t magnitude = 0;
    if (kRebias != 0 && bits < kRebias + (1u << 23)) {
      // The sum's last bit is the result's, so the addition rounds.
      const float sum = std::bit_cast<float>(bits) + std::bit_cast<float>(kSubnormal);
      magnitude = std::bit_cast<std::uint32_t>(sum) - kSubnormal;
    } else {
      const std::uint32_t odd = bits >> kShift & 1u;
      magnitude = (bits - kRebias + ((1u << (kShift - 1)) - 1 + odd)) >> kShift;
    }
    if (magnitude <= kLargest) return static_cast<Storage>(sign | magnitude);
    return static_cast<Storage>(has_infinity ? sign | kTopExponent : kNan);
  }
};

using Float16 = SmallFloat<std::uint16_t, 5, 10, true>;
using BFloat16 = SmallFloat<std::uint16_t, 8, 7, true>;
using Float8E4M3 = SmallFloat<std::uint8_t, 4, 3, false>;
using Float8E5M2 = SmallFloat<std::uint8_t, 5, 2, true>;

}  // namespace pycoll::device
