// The kernels: for each protocol the executor with fixed sums of the types that training uses, with
// any reduction, and with any reduction on lists of arrays; a kernel for copies and two for codes.
// The names are those of kernels.h.
#include "device/kernels/codes/code_blocks.h"
#include "device/kernels/codes/sparse_sections.h"
#include "device/kernels/executor.h"
#include "device/kernels/packing.h"
#include "device/kernels/program.h"
#include "device/kernels/reductions.h"

namespace pycoll::device {
namespace {

template <typename Protocol, typename Arrays = OneArray, typename Reduction>
__device__ __forceinline__ void execute(const Program& program, const typename Arrays::Call& call,
                                        Reduction reduction) {
  __shared__ Shared shared;
  Executor<Protocol, Reduction, Arrays>(program, call, reduction, shared).run();
}

}  // namespace
}  // namespace pycoll::device

#define PYCOLL_KERNELS(name, Protocol)                                                      \
  extern "C" __global__ void __launch_bounds__(pycoll::device::kThreadsMax, 1)              \
      pycoll_##name##_sum_float32(const __grid_constant__ pycoll::device::Program program,  \
                                  const __grid_constant__ pycoll::device::Call call) {      \
    using namespace pycoll::device;                                                         \
    execute<Protocol>(program, call, FixedSum<Real<float>>());                              \
  }                                                                                         \
  extern "C" __global__ void __launch_bounds__(pycoll::device::kThreadsMax, 1)              \
      pycoll_##name##_sum_bfloat16(const __grid_constant__ pycoll::device::Program program, \
                                   const __grid_constant__ pycoll::device::Call call) {     \
    using namespace pycoll::device;                                                         \
    execute<Protocol>(program, call, FixedSum<BFloat16>());                                 \
  }                                                                                         \
  extern "C" __global__ void __launch_bounds__(pycoll::device::kThreadsMax, 1)              \
      pycoll_##name##_sum_float16(const __grid_constant__ pycoll::device::Program program,  \
                                  const __grid_constant__ pycoll::device::Call call) {      \
    using namespace pycoll::device;                                                         \
    execute<Protocol>(program, call, FixedSum<Float16>());                                  \
  }                                                                                         \
  extern "C" __global__ void __launch_bounds__(pycoll::device::kThreadsMax, 1)              \
      pycoll_##name##_any(const __grid_constant__ pycoll::device::Program program,          \
                          const __grid_constant__ pycoll::device::Call call) {              \
    using namespace pycoll::device;                                                         \
    execute<Protocol>(program, call, Any{program.dtype, program.op});                       \
  }                                                                                         \
  extern "C" __global__ void __launch_bounds__(pycoll::device::kThreadsMax, 1)              \
      pycoll_##name##_list(const __grid_constant__ pycoll::device::Program program,         \
                           const __grid_constant__ pycoll::device::ListCall call) {         \
    using namespace pycoll::device;                                                         \
    execute<Protocol, ManyArrays>(program, call, Any{program.dtype, program.op});           \
  }

PYCOLL_KERNELS(ll, Ll)
PYCOLL_KERNELS(ll128, Ll128)
PYCOLL_KERNELS(simple, Simple)
PYCOLL_KERNELS(pattern, Pattern)

extern "C" __global__ void __launch_bounds__(pycoll::device::kThreadsMax, 1)
    pycoll_copy(const __grid_constant__ pycoll::device::Copy copy) {
  pycoll::device::run_copy(copy);
}

// Registers for five blocks of a multiprocessor, which hide the latency of each other's loads.
extern "C" __global__ void __launch_bounds__(pycoll::device::kCodingThreads, 5)
    pycoll_code(const __grid_constant__ pycoll::device::Codings codings) {
  pycoll::device::run_codings(codings);
}

extern "C" __global__ void __launch_bounds__(pycoll::device::kCodingThreads, 5)
    pycoll_sparse(const __grid_constant__ pycoll::device::SparseCodings codings) {
  pycoll::device::run_sparse_codings(codings);
}
