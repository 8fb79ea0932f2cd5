// Vectors of a fixed number of bytes, written once for all instruction sets. They use the vector
// types that GCC and Clang share: arithmetic, comparison and a ? b : c work lane by lane.
//
// Every template here depends on a vector unit: a type in the anonymous namespace of one
// instruction set's file (see portable.cpp). This keeps every instance local to its file. Otherwise
// a linker that merges equal inline functions could give AVX-512 code to a processor without it.
// For the same reason these files use no function templates of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

#define PYCOLL_LANES [[gnu::always_inline]] static inline

namespace pycoll::kernels {

template <typename T, int bytes>
struct VectorOf {
  using Type [[gnu::vector_size(bytes)]] = T;
};

template <typename T, int bytes>
using Vector = typename VectorOf<T, bytes>::Type;

// The operations of a vector unit in portable form. The vector unit of an instruction set derives
// from this type and replaces the operations for which it has instructions. `Self` only makes the
// instance local to its file.
template <typename Self, int vector_bytes>
struct VectorUnit {
  template <typename T>
  using Full = Vector<T, vector_bytes>;
  using Bits = Full<std::int32_t>;
  using Words = Full<std::uint32_t>;
  using Halves = Full<std::uint16_t>;
  using Bytes = Full<std::uint8_t>;
  using Float = Full<float>;
  using LaneBytes = Vector<std::int8_t, vector_bytes / 4>;

  // Whether the vector unit has low_half_to_float and high_half_to_float (from the float16 in one
  // half of a vector), load_half_to_float, floats_to_half (two vectors to one), store_float_to_half
  // and round_to_half (to float16 and back). All round to nearest even and keep subnormals.
  static constexpr bool kConvertsHalf = false;

  // Whether lower_upper_halves is one instruction.
  static constexpr bool kBlends = false;

  // The steps that codec_formats.h needs.
  PYCOLL_LANES Words words(Float value) { return (Words)value; }
  PYCOLL_LANES Words words(Bits value) { return (Words)value; }
  PYCOLL_LANES Bits bits(Words value) { return (Bits)value; }
  PYCOLL_LANES Float floats(Words value) { return (Float)value; }
  template <typename A, typename B>
  PYCOLL_LANES Words below(A a, B b) {
    return (Words)(a < b);
  }
  PYCOLL_LANES Bits truncated(Float value) { return __builtin_convertvector(value, Bits); }
  PYCOLL_LANES Float numbers(Bits value) { return __builtin_convertvector(value, Float); }

  // Takes the lower half of each word of `lower` and the upper half of each word of `upper`.
  PYCOLL_LANES Words lower_upper_halves(Words lower, Words upper) {
    return (lower & 0xffffu) | (upper & 0xffff0000u);
  }

  // Takes the lower byte of each half of `even` and the upper byte of each half of `odd`.
  PYCOLL_LANES Halves even_odd_bytes(Halves even, Halves odd) {
    return (even & 0xff) | (odd & 0xff00);
  }

  // Whether either vector has a NaN.
  PYCOLL_LANES bool any_unordered(Float a, Float b) {
    return Self::any_top_bit((Bytes) ~((a == a) & (b == b)));
  }

  // Rounds to nearest even. `fraction` is in units of 2^-8 (bytes) or 2^-16 (halves).
  template <typename V>
  PYCOLL_LANES V round(V whole, V fraction) {
    constexpr int half = 1 << (8 * sizeof(whole[0]) - 1);
    // Above one half, or at one half and odd.
    return whole - (V)((fraction | (whole & 1)) > half);
  }

  // Reads a signed byte for each lane.
  PYCOLL_LANES Bits load_bytes(const char* from) {
    return __builtin_convertvector(Self::template load<LaneBytes>(from), Bits);
  }

  // Writes the lowest byte of each lane.
  PYCOLL_LANES void store_bytes(char* to, Words value) {
    Self::store(to, __builtin_convertvector((Bits)value, LaneBytes));
  }

  // The largest lane. Requires: none is negative.
  PYCOLL_LANES std::int32_t largest(Bits value) {
    std::int32_t found = 0;
    for (std::size_t lane = 0; lane < sizeof(value) / sizeof(found); ++lane) {
      if (value[lane] > found) found = value[lane];
    }
    return found;
  }

  // Bit i is the sign bit of lane i.
  PYCOLL_LANES std::uint32_t sign_bits(Float value) {
    const Words signs = (Words)value >> 31;
    std::uint32_t bits = 0;
    for (std::size_t lane = 0; lane < sizeof(value) / sizeof(float); ++lane) {
      bits |= signs[lane] << lane;
    }
    return bits;
  }

  // Whether the top bit of any byte is set.
  PYCOLL_LANES bool any_top_bit(Bytes bytes) {
    const auto words = (Full<std::uint64_t>)bytes;
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < sizeof(words) / sizeof(all); ++i) all |= words[i];
    return (all & 0x8080808080808080u) != 0;
  }

  template <typename V>
  PYCOLL_LANES V load(const char* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof(V));
    return value;
  }

  template <typename V>
  PYCOLL_LANES void store(char* to, V value) {
    __builtin_memcpy(to, &value, sizeof(V));
  }

  // Loads the first `bytes` bytes of a vector; the rest is zero. Requires: bytes < sizeof(V).
  template <typename V>
  PYCOLL_LANES V load_tail(const char* from, std::size_t bytes) {
    V value = {};
    copy_few(reinterpret_cast<char*>(&value), from, bytes);
    return value;
  }

  template <typename V>
  PYCOLL_LANES void store_tail(char* to, V value, std::size_t bytes) {
    copy_few(to, reinterpret_cast<const char*>(&value), bytes);
  }

 private:
  // Not inlined, because the branches would be repeated in every loop and dominate the code size.
  [[gnu::noinline]] static void copy_few(char* to, const char* from, std::size_t bytes) {
    copy_tail<vector_bytes / 2>(to, from, bytes);
  }

  // Copies pieces of halving, fixed sizes. This avoids a call of memcpy for the few bytes of a
  // small message.
  template <std::size_t piece>
  PYCOLL_LANES void copy_tail(char* to, const char* from, std::size_t bytes) {
    if (bytes & piece) {
      __builtin_memcpy(to, from, piece);
      to += piece;
      from += piece;
    }
    if constexpr (piece > 1) copy_tail<piece / 2>(to, from, bytes);
  }
};

// Several vectors that are computed as one: the numbers of one vector of small floats, widened to
// float32 and multiplied by 2^exponent. That multiplication must be exact.
template <typename M, int count, int exponent = 0>
struct Parts {
  typename M::Float part[count];

  [[gnu::always_inline]] friend Parts operator+(Parts a, Parts b) {
    for (int p = 0; p < count; ++p) a.part[p] += b.part[p];
    return a;
  }

  [[gnu::always_inline]] friend Parts operator*(Parts a, Parts b) {
    static_assert(exponent <= 0 && exponent > -31);
    for (int p = 0; p < count; ++p) a.part[p] *= b.part[p];
    if constexpr (exponent != 0) {
      for (int p = 0; p < count; ++p) a.part[p] *= static_cast<float>(1 << -exponent);
    }
    return a;
  }

  [[gnu::always_inline]] friend Parts operator/(Parts a, float by) {
    for (int p = 0; p < count; ++p) a.part[p] /= by;
    return a;
  }
};

}  // namespace pycoll::kernels
