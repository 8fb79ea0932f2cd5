// The choice of kernels: by instruction set, and by dtype, operation and codec.
#pragma once

#include <string_view>

#include "kernels/codecs.h"
#include "kernels/low_rank.h"
#include "kernels/reduce.h"

namespace pycoll::kernels {

// Whether this processor and this build support the instruction set. kReference and kPortable are
// always available.
bool available(Isa isa);
// The fastest available instruction set, or the one that the environment variable PYCOLL_ISA names
// (reference, portable, avx2, avx512, avx512fp16). An unknown or unavailable name is reported on
// stderr and ignored. The first call fixes the result. Any thread.
Isa best_isa();
std::string_view name_of(Isa isa);

// Whether the operation is defined for the dtype. Bitwise operations need integers or bool. min and
// max exclude complex; maxloc and minloc exclude complex and bool. All other operations accept
// every dtype.
bool defined(DType dtype, ReduceOp op);

// The kernel for elements in their own dtype. Empty if the pair is not defined(), for kUser, and
// for operations that combine in wire form only. Requires: available(isa).
Combine combine_for(DType dtype, ReduceOp op, Isa isa);
inline Combine combine_for(DType dtype, ReduceOp op) { return combine_for(dtype, op, best_isa()); }

// The division for kAvg; nullptr unless the dtype is float32, float64 or complex. Averages of small
// floats and integers have a wire form, and bool is never divided. Requires: a valid dtype,
// available(isa).
ScaleFunction scale_for(DType dtype, Isa isa);
inline ScaleFunction scale_for(DType dtype) { return scale_for(dtype, best_isa()); }

// Requires: available(isa). kReference has the kernels of kPortable; the tests' oracle is NumPy.
CodecKernels codec_kernels(CodecKind kind, Isa isa);
inline CodecKernels codec_kernels(CodecKind kind) { return codec_kernels(kind, best_isa()); }

// Requires: available(isa).
ProductFunction product_for(Isa isa);

// For this folder only: the tables of one instruction set (backend.h). Requires: available(isa).
struct Backend;
const Backend& backend_of(Isa isa);

}  // namespace pycoll::kernels
