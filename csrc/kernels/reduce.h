// Kernels combine bytes. One signature for every dtype, operation and instruction set; the scalar
// reference is the oracle, and every implementation gives its bits exactly.
//
// Meaning of combine(target, sources, source_count, count): element by element,
//   target[i] = (...((sources[0][i] op sources[1][i]) op sources[2][i]) ...)
// a left fold in the order given. Every binary step of a half or 8-bit float type is computed in
// float32 and rounded to the type (nearest, ties to even; subnormals kept), so the bits of a result
// do not depend on how a fold is cut into calls. float8_e4m3 overflow gives NaN; float8_e5m2,
// bfloat16 and float16 overflow give infinity. Complex products are (ac - bd, ad + bc), each
// operation rounded. Integers wrap; bool: sum and max are "or", prod and min are "and", bitwise as
// named. min and max: a NaN operand gives NaN; -0 < +0. kAvg combines as kSum; the division is
// scale(), or part of its wire form. Logical and location reductions combine in wire form only
// (wire.h).
//
// A NaN in any result of combine or scale (in either part of a complex one) is stored as the
// positive quiet NaN of the type without payload: 0x7fc00000, 0x7ff8000000000000, 0x7e00, 0x7fc0,
// 0x7f (e4m3), 0x7e (e5m2). Processors disagree about sign and payload, and compilers may swap
// operands, so bits could not be promised otherwise; it costs one comparison and one blend per
// vector.
//
// Kernels neither set nor read the rounding mode and the flush-to-zero flags: they mean what this
// page says under the defaults of the C++ environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/types.h"

namespace pycoll::kernels {

inline constexpr int kSourcesMax = 4;

// Requires: 2 <= source_count <= kSourcesMax. `target` may equal any source exactly, and must not
// overlap one otherwise. No alignment is required. `context` is nullptr but for user operations.
using CombineFunction = void (*)(void* target, const void* const* sources, int source_count,
                                 std::size_t count, void* context);

struct Combine {
  CombineFunction function = nullptr;
  void* context = nullptr;

  explicit operator bool() const { return function != nullptr; }
};

// Divides each element by `divisor` in place, by one correctly rounded division.
// Requires: 1 <= divisor <= 2^24, so that it is exact in float32.
using ScaleFunction = void (*)(void* data, std::size_t count, std::uint32_t divisor);

enum class Isa : std::uint8_t {
  kReference = 0,
  kPortable = 1,
  kAvx2 = 2,
  kAvx512 = 3,
  kAvx512Fp16 = 4,
};

// Whether this processor and this build can run it; kReference and kPortable always can.
bool available(Isa isa);
// The fastest available, or what the environment variable PYCOLL_ISA names (reference, portable,
// avx2, avx512, avx512fp16). A name that is unknown or not available here is reported on stderr and
// ignored. Fixed at first call; any thread.
Isa best_isa();
std::string_view name_of(Isa isa);

// Whether the operation means something for the dtype: bitwise on integers and bool only; min and
// max not on complex, maxloc and minloc on neither complex nor bool; logical ones and kUser always.
bool defined(DType dtype, ReduceOp op);

// The kernel for elements as they are; empty when not defined(), for kUser, and for what combines
// in wire form only. Requires: available(isa).
Combine combine_for(DType dtype, ReduceOp op, Isa isa);
inline Combine combine_for(DType dtype, ReduceOp op) { return combine_for(dtype, op, best_isa()); }

// nullptr unless the dtype is float32, float64 or complex: averages of small floats and integers
// have a wire form, and of bool nothing is divided. Requires: a valid dtype, available(isa).
ScaleFunction scale_for(DType dtype, Isa isa);
inline ScaleFunction scale_for(DType dtype) { return scale_for(dtype, best_isa()); }

}  // namespace pycoll::kernels
