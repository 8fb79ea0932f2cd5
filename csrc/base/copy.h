// Copies between memory ranges that do not overlap, for cases where memcpy is not the fastest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pycoll {

// True if an upward copy from `from` to `to` suffers from 4 KiB aliasing. Processors compare only
// the low 12 bits of addresses first, so a load waits for an unrelated earlier store. Two blocks of
// equal size from malloc() are often 16 bytes more than a multiple of 4096 apart, and memcpy
// between them is then much slower than usual.
inline bool aliases_4k(const void* to, const void* from) {
  constexpr std::uintptr_t kCompared = 4096, kNear = 64;
  const auto apart = reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from);
  return apart % kCompared != 0 && apart % kCompared < kNear;
}

// Copies from the last byte to the first. Requires: the two ranges do not overlap.
void copy_downwards(std::byte* to, const std::byte* from, std::size_t bytes);

// Copies with memcpy, or downwards where memcpy would suffer from 4 KiB aliasing. Requires: the two
// ranges do not overlap.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kWorthwhile = 1024;
  if (bytes >= kWorthwhile && aliases_4k(to, from)) return copy_downwards(to, from, bytes);
  std::memcpy(to, from, bytes);
}

// copy_bytes() to cache lines that another core read last. It prefetches several lines for writing
// at once, because plain stores would take them over one after the other.
void prefetch_and_copy(std::byte* to, const std::byte* from, std::size_t bytes);

// Copies with one string instruction ("rep movsb"). It takes lines over from other caches without
// reading them, and leaves them in this core's caches. memcpy on other processors.
void string_copy(std::byte* to, const std::byte* from, std::size_t bytes);

// Copies with non-temporal stores: the written lines do not stay in any cache. stream_fence()
// orders these stores before later ones. An ordinary copy if the processor has no such stores.
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes);

inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace pycoll
