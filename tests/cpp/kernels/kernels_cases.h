// Operands for kernel tests: random bit patterns in which the values that break kernels are
// frequent.
#pragma once

#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "base/prng.h"
#include "base/types.h"
#include "kernels/dispatch.h"

namespace pycoll::testing {

inline std::vector<DType> all_dtypes() {
  std::vector<DType> all;
  for (int i = 0; i < kDTypeCount; ++i) all.push_back(static_cast<DType>(i));
  return all;
}

inline std::vector<ReduceOp> all_ops() {
  std::vector<ReduceOp> all;
  for (int i = 0; i < kReduceOpCount; ++i) all.push_back(static_cast<ReduceOp>(i));
  return all;
}

// All that this machine can run, the reference apart.
inline std::vector<kernels::Isa> fast_isas() {
  std::vector<kernels::Isa> all;
  for (int i = 1; i <= static_cast<int>(kernels::Isa::kAvx512Fp16); ++i) {
    if (kernels::available(static_cast<kernels::Isa>(i))) {
      all.push_back(static_cast<kernels::Isa>(i));
    }
  }
  return all;
}

// How a float type is laid out; zero mantissa bits for the types that are none.
struct FloatLayout {
  int bits;  // of one real number, sign included
  int mantissa_bits;
};

inline FloatLayout layout_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {16, 10};
    case DType::kBFloat16:
      return {16, 7};
    case DType::kFloat32:
    case DType::kComplex64:
      return {32, 23};
    case DType::kFloat64:
    case DType::kComplex128:
      return {64, 52};
    case DType::kFloat8E4M3:
      return {8, 3};
    case DType::kFloat8E5M2:
      return {8, 2};
    default:
      return {static_cast<int>(8 * item_bytes(dtype)), 0};
  }
}

// The bits of one number: uniform patterns (half of which are far apart in exponent), numbers near
// 1 (whose sums tie and cancel), and the ends of the type with their neighbours.
inline std::uint64_t random_word(Prng& prng, FloatLayout layout) {
  const std::uint64_t mask = ~0ULL >> (64 - layout.bits);
  const std::uint64_t pattern = prng.next() & mask;
  const std::uint64_t sign = 1ULL << (layout.bits - 1);
  const std::uint64_t hidden = 1ULL << layout.mantissa_bits;
  const std::uint64_t top = (sign - 1) & ~(hidden - 1);  // the exponent all ones
  const std::uint64_t near_one = top / 2 & ~(hidden - 1);
  const std::uint64_t ends[] = {
      0,   1,       2,        hidden - 1, hidden,   hidden + 1,      top - 1,
      top, top + 1, sign - 1, sign - 2,   near_one, top | hidden / 2};
  switch (prng.below(4)) {
    case 0:
      return (ends[prng.below(std::size(ends))] | (prng.chance(1, 2) ? sign : 0)) & mask;
    case 1:
      return (near_one + prng.below(4 * hidden)) ^ (pattern & sign);
    default:
      return pattern;
  }
}

inline void fill_random(Prng& prng, DType dtype, unsigned char* data, std::size_t count) {
  const FloatLayout layout = layout_of(dtype);
  const std::size_t word_bytes = static_cast<std::size_t>(layout.bits) / 8;
  const std::size_t words = count * item_bytes(dtype) / word_bytes;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t word = random_word(prng, layout);
    if (dtype == DType::kBool && prng.chance(3, 4)) word &= 1;
    std::memcpy(data + i * word_bytes, &word, word_bytes);
  }
}

inline std::string hex(const unsigned char* data, std::size_t bytes) {
  std::string text = "0x";
  char two[3];
  for (std::size_t i = bytes; i-- > 0;) {
    std::snprintf(two, sizeof(two), "%02x", data[i]);
    text += two;
  }
  return text;
}

}  // namespace pycoll::testing
