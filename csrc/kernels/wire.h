// Wire forms: what travels where an array's own elements would not do.
//
// | op | dtype | an element travels as | and comes back as |
// |---|---|---|---|
// | avg | 16- and 8-bit floats | float32, times 2^-k | sum / (ranks * 2^-k), rounded to the type |
// | avg | integers of 8, 16, 32 bits | int32, int32, int64 | sum / ranks, towards zero |
// | avg | integers of 64 bits | int64 quotient and remainder by ranks | the same mean |
// | land, lor, lxor | any | bool: whether it is not zero | 1 or 0 |
// | maxloc, minloc | integers, real floats | pairs: two int64 in the order of the type | the pair |
//
// k is the smallest number with 2^k >= ranks. So a sum of float32 cannot overflow, and no bit of a
// subnormal is lost: the 16-bit floats leave 16 exponents of float32 free below them, which is why
// kMeanRanksMax is the limit. The sums of integers are exact. Every value of an array takes part
// in wire form, so the bits of a result depend on how a fold is ordered as those of float32 sums
// do, and of all others not at all.
//
// float32, float64 and complex travel as they are: their averages are the sum divided at the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace pycoll::kernels {

// Worlds in which the sum of so many 16-bit values fits into its wire form.
inline constexpr std::uint32_t kMeanRanksMax = 1u << 16;

// `groups` of array elements to wire elements, and back. Memory must not overlap; no alignment is
// required. Requires: 2 <= ranks <= kMeanRanksMax.
using EnterFunction = void (*)(void* wire, const void* array, std::size_t groups,
                               std::uint32_t ranks);
using LeaveFunction = void (*)(void* array, const void* wire, std::size_t groups,
                               std::uint32_t ranks);

// How many elements of the array and of the wire belong together is `array_items` and
// `wire_items`: one of each, but for averages of 64-bit integers (1 and 2) and pairs (2 and 1).
struct WireForm {
  EnterFunction enter = nullptr;  // nullptr: elements travel as they are
  LeaveFunction leave = nullptr;
  Combine combine;
  DType dtype = DType::kBool;  // its size is that of a wire element; pairs travel as kComplex128
  std::uint8_t array_items = 1;
  std::uint8_t wire_items = 1;

  explicit operator bool() const { return enter != nullptr; }
};

// Requires: available(isa), and defined(dtype, op) or an op that has no wire form.
WireForm wire_form(DType dtype, ReduceOp op, Isa isa);
inline WireForm wire_form(DType dtype, ReduceOp op) { return wire_form(dtype, op, best_isa()); }

}  // namespace pycoll::kernels
