// Defines the symbols of x86.cpp, avx2.cpp, avx512.cpp and avx512fp16.cpp for other processors.
#include "kernels/backend.h"

namespace pycoll::kernels {

const Backend kAvx2Backend{};
const Backend kAvx512Backend{};
const Backend kAvx512Fp16Backend{};

bool processor_has_avx2() { return false; }
bool processor_has_avx512() { return false; }
bool processor_has_avx512fp16() { return false; }

}  // namespace pycoll::kernels
