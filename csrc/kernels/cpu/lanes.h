// Vectors of a fixed number of bytes, written once for every instruction set with the vector types
// that GCC and Clang share: arithmetic, comparison and a ? b : c work lane by lane.
//
// Everything here hangs on a Machine, a type of an anonymous namespace in the file of one
// instruction set (see portable.cpp). That keeps every instance local to its file: a linker that
// merged equal inline functions could otherwise give AVX-512 code to a processor without it. For
// the same reason these files use no template of the standard library.
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

// What a machine can do, in portable form; a machine derives from it and replaces what it has
// instructions for. `Self` only makes the instance local.
template <typename Self, int vector_bytes>
struct Machine {
  template <typename T>
  using Full = Vector<T, vector_bytes>;
  using Bits = Full<std::int32_t>;
  using Words = Full<std::uint32_t>;
  using Halves = Full<std::uint16_t>;
  using Bytes = Full<std::uint8_t>;
  using Float = Full<float>;

  // Whether it has low_half_to_float, high_half_to_float (from the 16-bit floats in one half of a
  // vector), load_half_to_float, floats_to_half (two vectors to one), store_float_to_half and
  // round_to_half (there and back), all rounding to nearest even and keeping subnormals.
  static constexpr bool kConvertsHalf = false;

  // Whether lower_upper_halves is one instruction.
  static constexpr bool kBlends = false;

  // The lower half of each word of one, the upper half of each word of the other.
  PYCOLL_LANES Words lower_upper_halves(Words lower, Words upper) {
    return (lower & 0xffffu) | (upper & 0xffff0000u);
  }

  // The lower byte of each half of one, the upper byte of each half of the other.
  PYCOLL_LANES Halves even_odd_bytes(Halves even, Halves odd) {
    return (even & 0xff) | (odd & 0xff00);
  }

  // Whether either has a NaN.
  PYCOLL_LANES bool any_unordered(Float a, Float b) {
    return Self::any_top_bit((Bytes) ~((a == a) & (b == b)));
  }

  // To nearest even: `fraction` is in units of 2^-8 (bytes) or 2^-16 (halves).
  template <typename V>
  PYCOLL_LANES V rounded(V whole, V fraction) {
    constexpr int half = 1 << (8 * sizeof(whole[0]) - 1);
    // Above one half, or at one half and odd.
    return whole - (V)((fraction | (whole & 1)) > half);
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

  // The first `bytes` bytes of a vector, the rest zero. Requires: bytes < sizeof(V).
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
  // Not inlined: twenty branches in each of two hundred loops were half of what is compiled.
  [[gnu::noinline]] static void copy_few(char* to, const char* from, std::size_t bytes) {
    copy_tail<vector_bytes / 2>(to, from, bytes);
  }

  // Halving pieces of fixed size: no call of memcpy for the few bytes of a small message.
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

// Several vectors that are computed as one: the numbers of one vector of small ones, made wide and
// multiplied by 2^exponent, which must be exact.
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
