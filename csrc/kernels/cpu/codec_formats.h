// How a value of a block becomes a code (see codecs.h). A format works on values that are divided
// by the scale of the block.
#pragma once

#include "kernels/cpu/lanes.h"

namespace pycoll::kernels {

// A code in each lane, in the low bits, and the number that it stands for.
template <typename M>
struct Coded {
  typename M::Words code;
  typename M::Float value;
};

// Integers of -largest to largest.
template <typename M, int largest>
struct IntegerCodes {
  using Words = typename M::Words;
  using Bits = typename M::Bits;
  using Float = typename M::Float;
  static constexpr float kLargest = largest;

  // The sum with 1.5 * 2^23 is rounded to an integer by the addition itself.
  PYCOLL_LANES Coded<M> nearest(Float y) {
    constexpr float kMagic = 12582912.0f;
    const Float sum = y + kMagic;
    return {(Words)sum, sum - kMagic};
  }

  // `chances` are in 0 .. 2^16 - 1. The shift rounds towards minus infinity.
  PYCOLL_LANES Coded<M> stochastic(Float y, Words chances) {
    const auto fixed = __builtin_convertvector(y * 65536.0f, Bits);
    const Bits code = (fixed + (Bits)chances) >> 16;
    return {(Words)code, __builtin_convertvector(code, Float)};
  }

  PYCOLL_LANES Float value(Bits code) { return __builtin_convertvector(code, Float); }
};

// float8_e4m3. The largest number is 448, and a block's values do not exceed it before rounding.
template <typename M>
struct Float8Codes {
  using Words = typename M::Words;
  using Bits = typename M::Bits;
  using Float = typename M::Float;
  static constexpr float kLargest = 448.0f;

  PYCOLL_LANES Coded<M> nearest(Float y) {
    const Words magnitude = (Words)y & 0x7fffffffu;
    // Drops 20 bits of the mantissa, and changes the bias from 127 to 7.
    const Words normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
    // The last place of a sum with 2^14 is 2^-9, that of a subnormal code.
    const Words subnormal = (Words)((Float)magnitude + 16384.0f) - 0x46800000u;
    const Words below = (Words)((Bits)magnitude < (121 << 23));
    const Words code = (below & subnormal) | (~below & normal) | (((Words)y >> 31) << 7);
    return {code, value((Bits)code)};
  }

  PYCOLL_LANES Coded<M> stochastic(Float y, Words /*chances*/) { return nearest(y); }

  // A subnormal code is read with the exponent -6 and a leading one, which is then subtracted.
  PYCOLL_LANES Float value(Bits code) {
    const Words magnitude = (Words)code & 0x7f;
    const Words normal = (magnitude << 20) + (120u << 23);
    const Float subnormal = (Float)(normal + (1u << 23)) - 0.015625f;
    const Words below = (Words)((Bits)magnitude < 8);
    const Words number = (below & (Words)subnormal) | (~below & normal);
    return (Float)(number | (((Words)code & 0x80) << 24));
  }
};

}  // namespace pycoll::kernels
