// A pack of sixteen bytes, the widest access of a thread, and the macros in front of functions that
// run in kernels. Headers of this folder marked "Device code" compile twice: by nvcc for the
// device, and as plain C++ over an emulated memory (memory.h), in which the tests run them.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYCOLL_DEVICE __device__ __forceinline__
// Compiled once per module, however many kernels call it.
#define PYCOLL_DEVICE_CALL __device__ __noinline__
#define PYCOLL_UNROLL _Pragma("unroll")
#define PYCOLL_NO_UNROLL _Pragma("unroll 1")
#else
#define PYCOLL_DEVICE inline
#define PYCOLL_DEVICE_CALL inline
#define PYCOLL_UNROLL
#define PYCOLL_NO_UNROLL
#endif

namespace pycoll::device {

struct alignas(16) Pack {
  std::uint64_t low;
  std::uint64_t high;
};
static_assert(sizeof(Pack) == 16);

inline constexpr std::uint32_t kPackBytes = sizeof(Pack);
// Threads that run in step and can vote (warp_any).
inline constexpr std::uint32_t kWarp = 32;

}  // namespace pycoll::device
