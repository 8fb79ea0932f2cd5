// Sparse codes: the places of some values of an array, and these values. All instruction sets give
// the same places and bits.
//
// A magnitude is the bits of a float32 without its sign. Magnitudes compare as whole numbers do,
// and each NaN is above infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/reduce.h"

namespace pycoll::kernels {

// The array to choose from: `values`, or `values` plus `rests` if `rests` is not nullptr. Then
// `sums`, if not nullptr, gets the sums; it may equal one of the two. No alignment is required.
struct SparseInput {
  const float* values = nullptr;
  const float* rests = nullptr;
  float* sums = nullptr;
  std::size_t count = 0;  // at most kSparseMax
};

inline constexpr std::size_t kSparseMax = std::size_t{1} << 32;

// The places ascend. Both vectors have the same length.
struct SparseCodes {
  std::vector<std::uint32_t> places;
  std::vector<float> values;
};

// Codes in memory of any alignment: `number` places, and as many values.
struct SparseSpan {
  const std::byte* places = nullptr;
  const std::byte* values = nullptr;
  std::size_t number = 0;
};

// Chooses all values whose magnitude is at least `bound`, which is not NaN. Requires:
// available(isa).
SparseCodes values_from(const SparseInput& input, float bound, Isa isa);

// Chooses the `number` values of the largest magnitudes, or all if there are fewer. Of equal
// magnitudes the first ones are chosen; all NaN count as equal. Requires: available(isa).
//
// A bound from a sample of the values leaves out most others in one pass. It does not change the
// result: where too few values reach it, a second pass takes all.
SparseCodes largest_values(const SparseInput& input, std::size_t number, Isa isa);

// Adds the arrays of `count` values that the codes stand for, from the left, and divides by
// `divisor` unless it is 0. Places that no codes name are left out. Returns false if places do not
// ascend, or not below `count`; `result` is then undefined.
bool fold_codes(const std::vector<SparseSpan>& codes, std::size_t count, std::uint32_t divisor,
                SparseCodes* result);

// Writes the `count` values that the codes stand for; values without a place are 0. Returns false
// as fold_codes(); `values` are then undefined.
bool spread_codes(const SparseSpan& codes, float* values, std::size_t count);

// As spread_codes(), but values without a place stay.
bool place_codes(const SparseSpan& codes, float* values, std::size_t count);

// Writes ascending places as bytes: for each the places between it and the one before, 7 bits to a
// byte, the lowest first; all bytes of a gap but the last have their top bit set.
std::vector<std::uint8_t> pack_places(const std::byte* places, std::size_t number);

// Reads `number` places, the inverse of pack_places(). Returns false unless the bytes hold exactly
// so many and all are below `count`.
bool unpack_places(const std::uint8_t* bytes, std::size_t size, std::size_t number,
                   std::size_t count, std::vector<std::uint32_t>* places);

}  // namespace pycoll::kernels
