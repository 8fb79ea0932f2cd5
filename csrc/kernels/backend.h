// The functions that each instruction set provides for reduce.h. Private to csrc/kernels.
#pragma once

#include "kernels/codecs.h"
#include "kernels/low_rank.h"
#include "kernels/reduce.h"
#include "kernels/wire_form.h"

namespace pycoll::kernels {

// Writes the places, counted from 0, of the values whose magnitude is at least `bound`, and returns
// their number; see sparse_codes.h. `places` holds `count`, at most 2^31. If `rests` is not
// nullptr, it is added to the values, and `sums`, which may equal either of the two, gets the sums.
using CollectFunction = std::size_t (*)(std::uint32_t* places, float* sums, const float* values,
                                        const float* rests, std::size_t count, std::uint32_t bound);

// Function tables of one instruction set. They are read once per operation, not per segment.
// combine and scale return a function for every valid pair: dispatch.cpp checks defined() first and
// maps kAvg to kSum.
struct Backend {
  CombineFunction (*combine)(DType dtype, ReduceOp op);
  ScaleFunction (*scale)(DType dtype);
  EnterFunction (*enter_mean)(DType dtype);  // 16- and 8-bit floats to float32
  LeaveFunction (*leave_mean)(DType dtype);
  CodecKernels (*codec)(CodecKind kind);
  CollectFunction collect;
  ProductFunction product;
};

// 2^-k with the smallest k for which 2^k >= ranks. Always inlined, because files of different
// instruction sets must not share a function.
[[gnu::always_inline, maybe_unused]] static inline float mean_factor(std::uint32_t ranks) {
  const int k = ranks < 2 ? 0 : 32 - __builtin_clz(ranks - 1);
  const std::uint32_t bits = static_cast<std::uint32_t>(127 - k) << 23;
  float factor = 0;
  __builtin_memcpy(&factor, &bits, sizeof(factor));
  return factor;
}

extern const Backend kReferenceBackend;
extern const Backend kPortableBackend;
// Empty if the build is for another processor family.
extern const Backend kAvx2Backend;
extern const Backend kAvx512Backend;
extern const Backend kAvx512Fp16Backend;  // empty also if the compiler lacks -mavx512fp16

// Whether the processor and the operating system support the backend of that name.
bool processor_has_avx2();
bool processor_has_avx512();
bool processor_has_avx512fp16();

}  // namespace pycoll::kernels
