// The arithmetic of codecs (see codecs.h), written once for the vectors of processors and for the
// threads of devices. M is a vector unit (cpu/lanes.h) or a thread of a device
// (device/kernels/codes/code_blocks.h) with
//
//   Words, Bits, Float   32-bit lanes: unsigned, signed, float
//   words, bits, floats  the same bits as another type
//   below(a, b)          Words: all bits of the lanes where a < b, which are Bits or a number
//   truncated(x)         the number towards zero, as Bits
//   numbers(n)           the whole numbers as floats
//
// A compiler must not contract a*b+c here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define PYCOLL_LANES __device__ __forceinline__ static
#else
#include "kernels/cpu/lanes.h"
#endif

namespace pycoll::kernels {

constexpr std::uint32_t kNanBits = 0x7fc00000u;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// A code in each lane, in the low bits, and the number that it stands for.
template <typename M>
struct Coded {
  typename M::Words code;
  typename M::Float value;
};

// A residual keeps `x` less `sent`, the number that its code stands for, and 0 if the difference is
// not finite: an infinity in a residual would spoil every later call.
template <typename M>
PYCOLL_LANES typename M::Float rest_of(typename M::Float x, typename M::Float sent) {
  constexpr auto kInfinity = static_cast<std::int32_t>(kInfinityBits);
  const typename M::Words rest = M::words(x - sent);
  return M::floats(rest & M::below(M::bits(rest & 0x7fffffffu), kInfinity));
}

// Integers of -largest to largest. A format works on values that are divided by the scale of the
// block.
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
    return {M::words(sum), sum - kMagic};
  }

  // `chances` are in 0 .. 2^16 - 1. The shift rounds towards minus infinity.
  PYCOLL_LANES Coded<M> stochastic(Float y, Words chances) {
    const Bits code = (M::truncated(y * 65536.0f) + M::bits(chances)) >> 16;
    return {M::words(code), M::numbers(code)};
  }

  PYCOLL_LANES Float value(Bits code) { return M::numbers(code); }
};

// float8_e4m3. The largest number is 448, and a block's values do not exceed it before rounding.
template <typename M>
struct Float8Codes {
  using Words = typename M::Words;
  using Bits = typename M::Bits;
  using Float = typename M::Float;
  static constexpr float kLargest = 448.0f;

  PYCOLL_LANES Coded<M> nearest(Float y) {
    const Words magnitude = M::words(y) & 0x7fffffffu;
    // Drops 20 bits of the mantissa, and changes the bias from 127 to 7.
    const Words normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
    // The last place of a sum with 2^14 is 2^-9, that of a subnormal code.
    const Words subnormal = M::words(M::floats(magnitude) + 16384.0f) - 0x46800000u;
    const Words below = M::below(M::bits(magnitude), 121 << 23);
    const Words code = (below & subnormal) | (~below & normal) | ((M::words(y) >> 31) << 7);
    return {code, value(M::bits(code))};
  }

  PYCOLL_LANES Coded<M> stochastic(Float y, Words /*chances*/) { return nearest(y); }

  // A subnormal code is read with the exponent -6 and a leading one, which is then subtracted.
  PYCOLL_LANES Float value(Bits code) {
    const Words magnitude = M::words(code) & 0x7f;
    const Words normal = (magnitude << 20) + (120u << 23);
    const Float subnormal = M::floats(normal + (1u << 23)) - 0.015625f;
    const Words below = M::below(M::bits(magnitude), 8);
    const Words number = (below & M::words(subnormal)) | (~below & normal);
    return M::floats(number | ((M::words(code) & 0x80) << 24));
  }
};

template <typename M>
struct BFloat16Codes {
  using Words = typename M::Words;
  using Float = typename M::Float;

  PYCOLL_LANES Words nearest(Float x) {
    const Words word = M::words(x);
    const Words rounded = (word + 0x7fffu + ((word >> 16) & 1)) >> 16;
    constexpr auto kInfinity = static_cast<std::int32_t>(kInfinityBits);
    const Words no_number = M::below(kInfinity, M::bits(word & 0x7fffffffu));
    return (no_number & (kNanBits >> 16)) | (~no_number & rounded);
  }

  PYCOLL_LANES Float value(Words code) { return M::floats(code << 16); }
};

// The factors of a block of integers or 8-bit floats.
struct BlockScale {
  float scale;
  float inverse;
};

// The steps of a block of `Format`.
template <typename M, typename Format>
struct ScaledValues {
  using Words = typename M::Words;
  using Bits = typename M::Bits;
  using Float = typename M::Float;

  // `most_bits` are those of the largest magnitude in the block, below those of infinity.
  PYCOLL_LANES BlockScale factors(std::uint32_t most_bits) {
    constexpr float kSmallestNormal = 0x1p-126f;
    const float most = __builtin_bit_cast(float, most_bits);
    BlockScale made{most / Format::kLargest, Format::kLargest / most};
    if (most < Format::kLargest * kSmallestNormal) made = {0, 0};
    return made;
  }

  PYCOLL_LANES Coded<M> nearest(Float x, BlockScale by) {
    const Coded<M> near = Format::nearest(x * by.inverse);
    const Words half = M::words(near.value * by.scale * 0.5f) & 0x7fffffffu;
    const Words twice = M::below(M::bits(M::words(x) & 0x7fffffffu), M::bits(half));
    return {near.code & ~twice, M::floats(M::words(near.value) & ~twice)};
  }

  PYCOLL_LANES Coded<M> stochastic(Float x, BlockScale by, Words chances) {
    return Format::stochastic(x * by.inverse, chances);
  }
};

// The random bits of stochastic rounding.
template <typename M>
struct Chances {
  using Words = typename M::Words;

  // 16 random bits for each index: the finalizer of MurmurHash3 on a sequence with a long period.
  PYCOLL_LANES Words of(std::uint32_t seed, Words index) {
    Words mixed = index * 0x9e3779b1u + seed;
    mixed = (mixed ^ (mixed >> 16)) * 0x85ebca6bu;
    mixed = (mixed ^ (mixed >> 13)) * 0xc2b2ae35u;
    return (mixed ^ (mixed >> 16)) >> 16;
  }

  // The seed of a block, from that of the codec and the index of the block's first value.
  PYCOLL_LANES std::uint32_t block_seed(std::uint64_t seed, std::uint64_t first) {
    std::uint64_t mixed = (seed ^ (first * 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 29)) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>(mixed >> 32);
  }
};

// The steps of a block of signs.
template <typename M>
struct SignValues {
  static constexpr std::size_t kSums = 16;

  // `sum` is that of the magnitudes of `count` values.
  PYCOLL_LANES float scale(float sum, std::size_t count) {
    const float mean = sum / static_cast<float>(count);
    const float infinity = __builtin_bit_cast(float, kInfinityBits);
    return mean < infinity ? mean : __builtin_bit_cast(float, kNanBits);
  }

  // The scale with the sign bit of each lane.
  PYCOLL_LANES typename M::Float value(typename M::Words signs, typename M::Words scales) {
    return M::floats((signs & 0x80000000u) ^ scales);
  }
};

}  // namespace pycoll::kernels
