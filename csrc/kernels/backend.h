// What each instruction set brings to reduce.h. Private to csrc/kernels.
#pragma once

#include "kernels/reduce.h"
#include "kernels/wire.h"

namespace pycoll::kernels {

// Asked once per operation, never on the path of the bytes. combine and scale give nullptr for no
// valid pair: dispatch.cpp has asked defined() before, and maps kAvg to kSum.
struct Backend {
  CombineFunction (*combine)(DType dtype, ReduceOp op);
  ScaleFunction (*scale)(DType dtype);
  EnterFunction (*enter_mean)(DType dtype);  // of 16- and 8-bit floats: to float32
  LeaveFunction (*leave_mean)(DType dtype);
};

// 2^-k with the smallest k with 2^k >= ranks. Inlined everywhere: files of several instruction
// sets share no function.
[[gnu::always_inline, maybe_unused]] static inline float mean_factor(std::uint32_t ranks) {
  const int k = ranks < 2 ? 0 : 32 - __builtin_clz(ranks - 1);
  const std::uint32_t bits = static_cast<std::uint32_t>(127 - k) << 23;
  float factor = 0;
  __builtin_memcpy(&factor, &bits, sizeof(factor));
  return factor;
}

extern const Backend kReferenceBackend;
extern const Backend kPortableBackend;
// Empty where the build is for another processor family.
extern const Backend kAvx2Backend;
extern const Backend kAvx512Backend;
extern const Backend kAvx512Fp16Backend;  // empty where the compiler does not know it, too

// The functions of the wire form of averages of a 16- or 8-bit float.
WireForm small_mean(DType dtype, Isa isa);

// Whether processor and operating system can run the backend of that name.
bool processor_has_avx2();
bool processor_has_avx512();
bool processor_has_avx512fp16();

}  // namespace pycoll::kernels
