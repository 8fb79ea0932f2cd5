// A format is a type's layout in memory (Narrow) and the vector in which it is computed (Wide).
//   decode(Narrow) -> Wide       exact
//   encode(Wide) -> Narrow       rounds to the type; NaN becomes the canonical NaN
//   round_wide(Wide) -> Wide     rounds to the type and stays wide; NaN stays NaN
//   load(from), store(to, Wide)  optional: decode and encode from and to memory, where faster
//   any_nan(values)              optional: whether a vector of a block has a NaN; if none has,
//                                the block is stored without encode
// kUnroll is the number of vectors per iteration of a loop; it is lower where the steps are long.
#pragma once

#include "kernels/cpu/lanes.h"

namespace pycoll::kernels {

template <typename M, typename T>
struct IntegerFormat {
  using Narrow = typename M::template Full<T>;
  using Wide = Narrow;
  static constexpr int kUnroll = 4;

  PYCOLL_LANES Wide decode(Narrow value) { return value; }
  PYCOLL_LANES Wide round_wide(Wide value) { return value; }
  PYCOLL_LANES Narrow encode(Wide value) { return value; }
};

template <typename M, typename T, typename Word, Word nan>
struct RealFormat {
  using Narrow = typename M::template Full<T>;
  using Wide = Narrow;
  using Divisor = T;
  static constexpr int kUnroll = 4;

  PYCOLL_LANES Wide decode(Narrow value) { return value; }
  PYCOLL_LANES Wide round_wide(Wide value) { return value; }
  PYCOLL_LANES Narrow encode(Wide value) {
    using Words = typename M::template Full<Word>;
    return value == value ? value : (Wide)(Words{} + nan);
  }

  // One comparison checks two vectors, where the vector unit supports it, because NaN is rare.
  template <int vectors>
    requires requires(Wide value) { M::any_unordered(value, value); }
  PYCOLL_LANES bool any_nan(const Wide (&values)[vectors]) {
    static_assert(vectors % 2 == 0);
    bool found = false;
    for (int v = 0; v < vectors; v += 2) found |= M::any_unordered(values[v], values[v + 1]);
    return found;
  }
};

template <typename M>
using Float32Format = RealFormat<M, float, std::int32_t, 0x7fc00000>;
template <typename M>
using Float64Format = RealFormat<M, double, std::int64_t, 0x7ff8000000000000>;

// Small floats for min and max: integers that compare as the numbers do, with -0 below +0. NaN
// becomes the integer that wins every comparison.
template <typename M, typename T, T infinity, T nan, bool smaller>
struct OrderedFormat {
  using Narrow = typename M::template Full<T>;
  using Wide = Narrow;
  static constexpr int kUnroll = 2;

  static constexpr T kMagnitude = static_cast<T>(~(T{1} << (8 * sizeof(T) - 1)));
  static constexpr T kWinner = smaller ? static_cast<T>(~kMagnitude) : kMagnitude;

  PYCOLL_LANES Wide decode(Narrow value) {
    return (value & kMagnitude) > infinity ? Wide{} + kWinner : flip_negative(value);
  }

  PYCOLL_LANES Narrow encode(Wide value) {
    return value == kWinner ? Narrow{} + nan : flip_negative(value);
  }

 private:
  // Negative numbers are stored as sign and magnitude. Flipping their magnitude bits gives integers
  // of the same order. The function is its own inverse.
  PYCOLL_LANES Narrow flip_negative(Narrow value) { return value < 0 ? value ^ kMagnitude : value; }
};

// Two bfloat16 per word. Shifting makes them float32 without moving anything to another word.
template <typename M>
struct BFloat16Format {
  using Narrow = typename M::Words;
  using Wide = Parts<M, 2>;
  using Divisor = float;
  using Float = typename M::Float;
  using Words = typename M::Words;
  static constexpr int kUnroll = 4;

  PYCOLL_LANES Wide decode(Narrow value) {
    return {{(Float)(value << 16), (Float)(value & 0xffff0000u)}};
  }

  // A NaN computed from bfloat16 operands has zeros in its low half, so rounding cannot carry.
  PYCOLL_LANES Wide round_wide(Wide value) {
    return {{(Float)(round((Words)value.part[0]) & 0xffff0000u),
             (Float)(round((Words)value.part[1]) & 0xffff0000u)}};
  }

  PYCOLL_LANES Narrow encode(Wide value) {
    return nearest({{canonical(value.part[0]), canonical(value.part[1])}});
  }

  // One comparison checks all parts, because NaN is rare.
  PYCOLL_LANES void store(char* to, Wide value) {
    if (M::any_unordered(value.part[0], value.part[1])) [[unlikely]] {
      M::store(to, encode(value));
    } else {
      M::store(to, nearest(value));
    }
  }

 private:
  using Halves = typename M::Halves;

  PYCOLL_LANES Narrow nearest(Wide value) {
    const Words low = (Words)value.part[0];
    const Words high = (Words)value.part[1];
    if constexpr (!M::kBlends) return round(low) >> 16 | (round(high) & 0xffff0000u);
    const auto whole = (Halves)M::lower_upper_halves(low >> 16, high);
    const auto fraction = (Halves)M::lower_upper_halves(low, high << 16);
    return (Narrow)M::round(whole, fraction);
  }

  // The upper half of each word is the result.
  PYCOLL_LANES Words round(Words value) { return value + 0x7fffu + (value >> 16 & 1u); }

  PYCOLL_LANES Float canonical(Float value) {
    return value == value ? value : (Float)(Words{} + 0x7fc00000u);
  }
};

// Any smaller float type by integer arithmetic, two or four per word. The code uses a float32
// subnormal only when it adds it to a normal number, which rounds it away. Therefore a thread that
// flushes subnormals gets the same bits.
template <typename M, int exponent_bits, int mantissa_bits, bool has_infinity>
struct SmallFormat {
  static constexpr int kWidth = 1 + exponent_bits + mantissa_bits;
  static constexpr int kCount = 32 / kWidth;

  using Narrow = typename M::Words;
  using Wide = Parts<M, kCount>;
  using Divisor = float;
  using Float = typename M::Float;
  using Bits = typename M::Bits;
  using Words = typename M::Words;
  static constexpr int kUnroll = 1;

  PYCOLL_LANES Wide decode(Narrow value) {
    Wide wide;
    for (int p = 0; p < kCount; ++p) {
      wide.part[p] = decode_top((Bits)(value << (32 - kWidth * (p + 1))));
    }
    return wide;
  }

  PYCOLL_LANES Wide round_wide(Wide value) { return decode(encode(value)); }

  PYCOLL_LANES Narrow encode(Wide value) {
    Narrow words = (Words)encode_one(value.part[0]);
    for (int p = 1; p < kCount; ++p) words |= (Words)encode_one(value.part[p]) << (kWidth * p);
    return words;
  }

 private:
  static constexpr std::int32_t kSign = static_cast<std::int32_t>(0x80000000u);
  static constexpr int kMagnitude = (1 << (kWidth - 1)) - 1;
  static constexpr int kTopExponent = kMagnitude >> mantissa_bits << mantissa_bits;
  static constexpr int kOverflow = has_infinity ? kTopExponent : kMagnitude;
  static constexpr int kNan = has_infinity ? kTopExponent | 1 << (mantissa_bits - 1) : kMagnitude;
  // The distance from the number's place in its type to its place in float32.
  static constexpr int kShift = 23 - mantissa_bits;
  static constexpr int kRebias = 127 - ((1 << (exponent_bits - 1)) - 1);
  // The float32 bits of two numbers: the smallest normal number of the type, and the number whose
  // last place is the smallest subnormal of the type. Adding the latter to a smaller number rounds
  // it to a multiple of that subnormal.
  static constexpr std::int32_t kSmallestNormal = (kRebias + 1) << 23;
  static constexpr std::int32_t kRounder = (kRebias + 1 + kShift) << 23;

  // Decodes a number in the top bits of each word; the bits below are ignored.
  PYCOLL_LANES Float decode_top(Bits word) {
    const Bits magnitude = (word >> (8 - exponent_bits)) & (kMagnitude << kShift);
    const Bits normal = magnitude + (kRebias << 23);
    const Float above = (Float)(magnitude | kSmallestNormal);
    const Bits tiny = (Bits)(above - (Float)(Bits{} + kSmallestNormal));
    const Bits finite = magnitude < 1 << 23 ? tiny : normal;
    const Bits number = magnitude >= kOverflow << kShift ? magnitude | 0x7f800000 : finite;
    return (Float)(number | (word & kSign));
  }

  // Returns the number in the low bits of each word, with zeros above.
  PYCOLL_LANES Bits encode_one(Float value) {
    const Bits magnitude = (Bits)value & 0x7fffffff;
    const Bits sign = (Bits)((Words)((Bits)value & kSign) >> (32 - kWidth));
    const Bits even = (magnitude >> kShift) & 1;
    const Bits normal =
        ((magnitude + even + ((1 << (kShift - 1)) - 1)) >> kShift) - (kRebias << mantissa_bits);
    const Bits tiny = (Bits)((Float)magnitude + (Float)(Bits{} + kRounder)) - kRounder;
    const Bits rounded = magnitude < kSmallestNormal ? tiny : normal;
    const Bits top = has_infinity ? sign | kOverflow : Bits{} + kNan;
    const Bits number = rounded >= kOverflow ? top : rounded | sign;
    return magnitude > 0x7f800000 ? Bits{} + kNan : number;
  }
};

template <typename M>
using Float16Format = SmallFormat<M, 5, 10, true>;
template <typename M>
using Float8E4M3Format = SmallFormat<M, 4, 3, false>;
template <typename M>
using Float8E5M2Format = SmallFormat<M, 5, 2, true>;

}  // namespace pycoll::kernels
