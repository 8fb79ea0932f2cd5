// Decides whether code for newer processors may run. Compiled for the baseline x86-64.
#include <cpuid.h>

#include "kernels/backend.h"

namespace pycoll::kernels {
namespace {

// Read by cpuid, because not every compiler knows these two features by name.
bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_fp16() {
  constexpr unsigned kFeatures = 7, kFp16 = 1u << 23;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) != 0 && (d & kFp16) != 0;
}

}  // namespace

// __builtin_cpu_supports also checks that the operating system saves the wide registers.
bool processor_has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }

bool processor_has_avx512() {
  return processor_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

bool processor_has_avx512fp16() { return processor_has_avx512() && has_fp16(); }

}  // namespace pycoll::kernels
