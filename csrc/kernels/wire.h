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
// sets the limit MEAN_RANKS_MAX in pycoll/types.py. The sums of integers are exact. Every value of
// an array passes through the wire form. The bits of an average of small floats depend on the order
// of the fold, as those of float32 sums do; the bits of all other results do not.
//
// float32, float64 and complex have no wire form: their averages are the sum, divided at the end.
#pragma once

#include "kernels/dispatch.h"
#include "kernels/wire_form.h"

namespace pycoll::kernels {

// The wire form of the pair; empty if there is none. Requires: available(isa), and defined(dtype,
// op) or an op that has no wire form.
WireForm wire_form(DType dtype, ReduceOp op, Isa isa);
inline WireForm wire_form(DType dtype, ReduceOp op) { return wire_form(dtype, op, best_isa()); }

}  // namespace pycoll::kernels
