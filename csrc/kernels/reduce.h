// Kernels combine arrays. All dtypes, operations and instruction sets share one signature. The
// scalar reference is the oracle: every implementation returns exactly its bits.
//
// combine(target, sources, source_count, count) computes for each element i
//   target[i] = (...((sources[0][i] op sources[1][i]) op sources[2][i]) ...)
// which is a left fold in the given order. Every binary step of a 16-bit or 8-bit float type is
// computed in float32 and rounded to the type (nearest, ties to even; subnormals kept). Therefore
// the bits of a result do not depend on how a fold is split into calls. Overflow gives NaN for
// float8_e4m3, and infinity for float8_e5m2, bfloat16 and float16. Complex products are (ac - bd,
// ad + bc), and each operation rounds. Integers wrap. For bool, sum and max are "or", prod and min
// are "and", and bitwise operations are as named. min and max: a NaN operand gives NaN; -0 < +0.
// kAvg combines as kSum; scale() or the wire form divides. Logical and location reductions combine
// in wire form only (wire.h).
//
// combine and scale store every NaN (in either part of a complex number) as the positive quiet NaN
// of the type without payload: 0x7fc00000, 0x7ff8000000000000, 0x7e00, 0x7fc0, 0x7f (e4m3), 0x7e
// (e5m2). Processors differ in the sign and payload of a NaN, and compilers may swap operands, so
// the bits would not be reproducible otherwise. The cost is one comparison and one blend per
// vector.
//
// Kernels neither read nor change the rounding mode and the flush-to-zero flags. The results
// described here assume the defaults of the C++ environment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace pycoll::kernels {

inline constexpr int kSourcesMax = 4;

// Requires: 2 <= source_count <= kSourcesMax. `target` may equal a source exactly, but must not
// overlap one otherwise. No alignment is required. `context` is nullptr except for user operations.
using CombineFunction = void (*)(void* target, const void* const* sources, int source_count,
                                 std::size_t count, void* context);

struct Combine {
  CombineFunction function = nullptr;
  void* context = nullptr;

  explicit operator bool() const { return function != nullptr; }
};

// Divides each element by `divisor` in place, with one correctly rounded division. Requires: 1 <=
// divisor <= 2^24, so that it is exact in float32.
using ScaleFunction = void (*)(void* data, std::size_t count, std::uint32_t divisor);

enum class Isa : std::uint8_t {
  kReference = 0,
  kPortable = 1,
  kAvx2 = 2,
  kAvx512 = 3,
  kAvx512Fp16 = 4,
};

}  // namespace pycoll::kernels
