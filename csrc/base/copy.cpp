#include "base/copy.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pycoll {
namespace {

constexpr std::size_t kLine = 64;

// Prefetches the lines for writing. On x86, __builtin_prefetch emits a prefetch for reading unless
// the compiler may assume more than the baseline instruction set. Processors without prefetchw
// execute it as a no-op.
void prefetch_for_write(const std::byte* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kLine) {
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" ::"m"(memory[at]));
#else
    __builtin_prefetch(memory + at, 1);
#endif
  }
}

#if defined(__x86_64__)
// Copies whole cache lines with non-temporal stores. Requires: `to` is aligned to a line.
using StreamLines = void(std::byte* to, const std::byte* from, std::size_t lines);

void stream_by_16(std::byte* to, const std::byte* from, std::size_t lines) {
  for (; lines != 0; --lines, to += kLine, from += kLine) {
    __m128i parts[4];
    std::memcpy(parts, from, kLine);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, parts[i]);
  }
}

// Preferred where available: wider stores copy faster than stores of 16 bytes.
__attribute__((target("avx"))) void stream_by_32(std::byte* to, const std::byte* from,
                                                 std::size_t lines) {
  for (; lines != 0; --lines, to += kLine, from += kLine) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, high);
  }
}

StreamLines* best_stream() {
  return __builtin_cpu_supports("avx") != 0 ? stream_by_32 : stream_by_16;
}
#endif

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  static StreamLines* const stream_lines = best_stream();
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (bytes >= head + kLine) {
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    stream_lines(to, from, bytes / kLine);
    const std::size_t streamed = bytes / kLine * kLine;
    to += streamed, from += streamed, bytes -= streamed;
  }
#endif
  std::memcpy(to, from, bytes);
}

void string_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
// Sanitizers do not see what inline assembly writes.
#if defined(__x86_64__) && !defined(PYCOLL_SANITIZED)
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
  std::memcpy(to, from, bytes);
#endif
}

void prefetch_and_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kPiece = 1024, kAhead = 2 * kPiece;
  prefetch_for_write(to, std::min(bytes, kAhead));
  for (; bytes > kPiece; to += kPiece, from += kPiece, bytes -= kPiece) {
    if (bytes > kAhead) prefetch_for_write(to + kAhead, std::min(bytes - kAhead, kPiece));
    copy_bytes(to, from, kPiece);
  }
  copy_bytes(to, from, bytes);
}

void copy_downwards(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kBlock = 64;
  while (bytes >= kBlock) {
    bytes -= kBlock;
    std::byte block[kBlock];
    std::memcpy(block, from + bytes, kBlock);
    std::memcpy(to + bytes, block, kBlock);
    __asm__ volatile("" ::: "memory");  // stops the compiler from merging the loop into memcpy
  }
  std::memcpy(to, from, bytes);
}

}  // namespace pycoll
