// Sums of 8-bit floats.
//
// A byte that is moved to the sign, the low exponent bits and the first mantissa bits of a float32
// is the number times a fixed power of two. This holds for subnormals too, which become subnormals
// of float32. Decoding is therefore a shift and a mask. The bits of the float32 sum are the
// magnitude of the result, followed by the fraction of its last place that decides the rounding.
//
// Eight bits of that fraction are enough. Let q be the last place of the result. If the last place
// of the smaller operand is at least q/256, the sum is a multiple of q/256. Otherwise that operand,
// which has at most four bits, is below q/32. The larger operand, so near to the sum, is a multiple
// of q. The fraction is then within 1/32 of 0 or 1, and its lower bits, which float32 itself may
// have rounded, do not matter. (The tests try all pairs.)
//
// Infinities, NaN and overflow are exceptions. The loop always detects them and computes the
// vectors around them with the exact format. Prod always uses the exact format, because some
// processors multiply subnormals slowly; their additions have no such penalty.
#pragma once

#include "kernels/cpu/fold.h"

namespace pycoll::kernels {

// `special` is the first magnitude that is not a number. `Exact` is the format for all exceptions.
template <typename M, int mantissa_bits, int special, typename Exact, int fixed>
struct ByteSum {
  [[gnu::noinline]] static void run(char* target, const void* const* sources, int source_count,
                                    std::size_t bytes) {
    const int count = fixed != 0 ? fixed : source_count;
    const char* from[kSourcesMax];
    for (int k = 0; k < count; ++k) from[k] = static_cast<const char*>(sources[k]);
    std::size_t at = ordinary(target, from, count, 0, bytes);
    while (at < bytes) {
      const std::size_t rest = bytes - at;
      const std::size_t piece = rest < kPiece ? rest : kPiece;
      exactly(target, sources, count, at, piece);
      at = ordinary(target, from, count, at + piece, bytes);
    }
  }

 private:
  using Words = typename M::Words;
  using Float = typename M::Float;
  using Bytes = typename M::Bytes;
  using Halves = typename M::Halves;
  using Signed = typename M::template Full<std::int16_t>;
  using SignedBytes = typename M::template Full<std::int8_t>;

  static constexpr std::size_t kBytes = sizeof(Bytes);
  // Bytes that are computed exactly after an exception. Exceptions often come in groups, and a call
  // after a failed attempt costs as much as two vectors.
  static constexpr std::size_t kPiece = 16 * kBytes;
  // The distance from a magnitude's place in a byte to its place in the upper half of a float32.
  static constexpr int kShift = 1 + mantissa_bits;

  // Adds whole vectors from `at` on and stops before the first exception. Returns the stop
  // position.
  PYCOLL_LANES std::size_t ordinary(char* target, const char* const* from, int count,
                                    std::size_t at, std::size_t bytes) {
    for (; at + kBytes <= bytes; at += kBytes) {
      Number sum = number(M::template load<Bytes>(from[0] + at));
      Bytes largest = sum.magnitude;
      for (int k = 1; k < count; ++k) {
        const Number next = number(M::template load<Bytes>(from[k] + at));
        largest = greater(largest, next.magnitude);
        sum = add(sum, next);
        largest = greater(largest, sum.magnitude);
      }
      if (M::any_top_bit(largest + (0x80 - special))) break;
      M::store(target + at, sum.bits);
    }
    return at;
  }

  struct Number {
    Bytes bits;
    Bytes magnitude;
  };

  PYCOLL_LANES Number number(Bytes bits) { return {bits, bits & 0x7f}; }

  PYCOLL_LANES Bytes greater(Bytes a, Bytes b) { return a > b ? a : b; }

  // The result is valid only if all magnitudes, that of the sum included, are ordinary.
  PYCOLL_LANES Number add(Number a, Number b) {
    const Halves a_even = spread((Halves)a.bits << 8);
    const Halves b_even = spread((Halves)b.bits << 8);
    const Halves a_odd = spread((Halves)a.bits);
    const Halves b_odd = spread((Halves)b.bits);
    const Halves even = sums(low(a_even) + low(b_even), high(a_even) + high(b_even));
    const Halves odd = sums(low(a_odd) + low(b_odd), high(a_odd) + high(b_odd));
    const Bytes whole = (Bytes)M::even_odd_bytes(even >> 8, odd);
    const Bytes fraction = (Bytes)M::even_odd_bytes(even, odd << 8);
    const Bytes magnitude = M::round(whole, fraction);
    return {magnitude | sign(a, b), magnitude};
  }

  // The sign of the larger operand; operands that cancel give +0.
  PYCOLL_LANES Bytes sign(Number a, Number b) {
    const Bytes larger = (SignedBytes)a.magnitude < (SignedBytes)b.magnitude ? b.bits : a.bits;
    return ((a.bits ^ b.bits) == 0x80 ? Bytes{} : larger) & 0x80;
  }

  // Makes the upper half of a float32 from the upper byte of a 16-bit half; the lower byte is
  // ignored.
  PYCOLL_LANES Halves spread(Halves upper) {
    constexpr int number = 0x8000 | 0x7f << (8 - kShift);
    return (Halves)((Signed)upper >> kShift) & number;
  }

  PYCOLL_LANES Float low(Halves numbers) { return (Float)((Words)numbers << 16); }
  PYCOLL_LANES Float high(Halves numbers) { return (Float)((Words)numbers & 0xffff0000u); }

  // Packs two vectors of sums into the lower and the upper halves of words. The magnitude is in the
  // upper byte of a half, the fraction in the lower byte.
  PYCOLL_LANES Halves sums(Float low, Float high) {
    constexpr int shift = 15 - mantissa_bits;
    return (Halves)M::lower_upper_halves((Words)low >> shift, (Words)high << (16 - shift));
  }

  static void exactly(char* target, const void* const* sources, int count, std::size_t at,
                      std::size_t bytes) {
    const void* from[kSourcesMax];
    for (int k = 0; k < count; ++k) from[k] = static_cast<const char*>(sources[k]) + at;
    Fold<M, Exact, typename Steps<M>::Sum, 0>::run(target + at, from, count, bytes);
  }
};

}  // namespace pycoll::kernels
