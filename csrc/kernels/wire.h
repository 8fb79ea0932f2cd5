// Wire forms: the representation in which elements travel if their own dtype is unsuitable.
//
// | op | dtype | wire element | result |
// |---|---|---|---|
// | avg | 16- and 8-bit floats | float32, times 2^-k | sum / (ranks * 2^-k), rounded to the type |
// | avg | integers of 8, 16, 32 bits | int32, int32, int64 | sum / ranks, towards zero |
// | avg | integers of 64 bits | int64 quotient and remainder by ranks | the same average |
// | logical and, or, xor | any | bool: whether the element is not zero | 1 or 0 |
// | maxloc, minloc | integers, real floats | pairs: two int64 in the order of the type | the pair |
//
// k is the smallest number with 2^k >= ranks. The factor prevents overflow of the float32 sum, and
// no bit of a subnormal is lost: float32 has 16 exponents below those of the 16-bit floats, which
// sets the limit kMeanRanksMax. The sums of integers are exact. Every value of an array passes
// through the wire form. The bits of an average of small floats depend on the order of the fold, as
// those of float32 sums do; the bits of all other results do not.
//
// float32, float64 and complex have no wire form: their averages are the sum, divided at the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace pycoll::kernels {

// The largest number of ranks for which the sum of 16-bit values fits into its wire form.
inline constexpr std::uint32_t kMeanRanksMax = 1u << 16;

// Convert `groups` groups of array elements to wire elements, and back. The two ranges must not
// overlap. No alignment is required. Requires: 2 <= ranks <= kMeanRanksMax.
using EnterFunction = void (*)(void* wire, const void* array, std::size_t groups,
                               std::uint32_t ranks);
using LeaveFunction = void (*)(void* array, const void* wire, std::size_t groups,
                               std::uint32_t ranks);

// One group is `array_items` elements of the array and `wire_items` elements on the wire: 1 and 1,
// except for averages of 64-bit integers (1 and 2) and pairs (2 and 1).
struct WireForm {
  EnterFunction enter = nullptr;  // nullptr: there is no wire form
  LeaveFunction leave = nullptr;
  Combine combine;
  DType dtype = DType::kBool;  // has the size of a wire element; pairs travel as kComplex128
  std::uint8_t array_items = 1;
  std::uint8_t wire_items = 1;

  explicit operator bool() const { return enter != nullptr; }
};

// The wire form of the pair; empty if there is none. Requires: available(isa), and defined(dtype,
// op) or an op that has no wire form.
WireForm wire_form(DType dtype, ReduceOp op, Isa isa);
inline WireForm wire_form(DType dtype, ReduceOp op) { return wire_form(dtype, op, best_isa()); }

}  // namespace pycoll::kernels
