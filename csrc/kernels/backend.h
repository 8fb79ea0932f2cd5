// What each instruction set brings to reduce.h. Private to csrc/kernels.
#pragma once

#include "kernels/reduce.h"

namespace pycoll::kernels {

// Asked once per operation, never on the path of the bytes. combine and scale give nullptr for no
// valid pair: dispatch.cpp has asked defined() before, and maps kAvg to kSum.
struct Backend {
  CombineFunction (*combine)(DType dtype, ReduceOp op);
  ScaleFunction (*scale)(DType dtype);
};

extern const Backend kReferenceBackend;
extern const Backend kPortableBackend;
// Empty where the build is for another processor family.
extern const Backend kAvx2Backend;
extern const Backend kAvx512Backend;
extern const Backend kAvx512Fp16Backend;  // empty where the compiler does not know it, too

// Whether processor and operating system can run the backend of that name.
bool processor_has_avx2();
bool processor_has_avx512();
bool processor_has_avx512fp16();

}  // namespace pycoll::kernels
