// Counts the allocations of a test program, for the promise that hot paths make none. Include it in
// the one source of the program: it replaces the global allocation functions, or, where a sanitizer
// owns those, listens to its hook.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace pycoll::testing {

inline std::atomic<std::uint64_t> allocation_counter{0};
inline std::uint64_t allocations() { return allocation_counter.load(); }

}  // namespace pycoll::testing

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PYCOLL_SANITIZER_ALLOCATES 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PYCOLL_SANITIZER_ALLOCATES 1
#endif
#endif

#ifdef PYCOLL_SANITIZER_ALLOCATES
extern "C" __attribute__((visibility("default"),
                          no_sanitize("address",
                                      "thread"))) void __sanitizer_malloc_hook(const volatile void*,
                                                                               std::size_t) {
  pycoll::testing::allocation_counter.fetch_add(1, std::memory_order_relaxed);
}
#else
namespace pycoll::testing {
inline void* counted(std::size_t bytes, std::size_t alignment = alignof(std::max_align_t)) {
  allocation_counter.fetch_add(1, std::memory_order_relaxed);
  const std::size_t rounded = (bytes + alignment) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  return memory != nullptr ? memory : (std::abort(), nullptr);
}
}  // namespace pycoll::testing

void* operator new(std::size_t bytes) { return pycoll::testing::counted(bytes); }
void* operator new[](std::size_t bytes) { return pycoll::testing::counted(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return pycoll::testing::counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return pycoll::testing::counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
#endif
