// The functions of memory.h in PTX. Only memory.h includes it.
#pragma once

#include <cstdint>

#include "device/kernels/pack.h"

namespace pycoll::device {

// A wait reads the stop word, which lies in host memory, once in so many polls.
inline constexpr std::uint32_t kPollsPerLook = 256;
// A wait reads the place where data seldom lie once in so many polls: the second load follows the
// first one and makes a poll slower.
inline constexpr std::uint32_t kPollsPerLookAside = 8;

PYCOLL_DEVICE std::uint32_t thread() { return threadIdx.x; }
PYCOLL_DEVICE std::uint32_t threads() { return blockDim.x; }
PYCOLL_DEVICE std::uint32_t block() { return blockIdx.x; }

template <typename T>
PYCOLL_DEVICE T load(const T* from) {
  return *from;
}
template <typename T>
PYCOLL_DEVICE void store(T* to, T value) {
  *to = value;
}
PYCOLL_DEVICE Pack load16(const void* from) {
  const ulonglong2 both = *static_cast<const ulonglong2*>(from);
  return {both.x, both.y};
}
PYCOLL_DEVICE void store16(void* to, Pack value) {
  *static_cast<ulonglong2*>(to) = make_ulonglong2(value.low, value.high);
}

PYCOLL_DEVICE Pack load16_relaxed(const Pack* from) {
  Pack value;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.low), "=l"(value.high)
               : "l"(from)
               : "memory");
  return value;
}
PYCOLL_DEVICE void store16_relaxed(Pack* to, Pack value) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(value.low),
               "l"(value.high)
               : "memory");
}
PYCOLL_DEVICE Pack load16_of_line(const Pack* from) { return load16_relaxed(from); }
PYCOLL_DEVICE void store16_of_line(Pack* to, Pack value) { store16_relaxed(to, value); }

PYCOLL_DEVICE std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
PYCOLL_DEVICE void store_relaxed(std::uint32_t* to, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
PYCOLL_DEVICE void add_relaxed(std::uint32_t* to, std::uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
PYCOLL_DEVICE std::uint64_t load_acquire(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
PYCOLL_DEVICE void store_release(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
PYCOLL_DEVICE void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

PYCOLL_DEVICE bool sync_any(bool value) { return __syncthreads_or(value ? 1 : 0) != 0; }
PYCOLL_DEVICE bool warp_any(bool value) { return __any_sync(0xffffffffu, value ? 1 : 0) != 0; }
PYCOLL_DEVICE std::uint32_t warp_bits(bool value) {
  return __ballot_sync(0xffffffffu, value ? 1 : 0);
}
PYCOLL_DEVICE std::uint32_t warp_take(std::uint32_t value, std::uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
}
// Does nothing: a sleep would add latency to every wait.
PYCOLL_DEVICE void pause(const void* /*polled*/, const void* /*other*/) {}

}  // namespace pycoll::device
