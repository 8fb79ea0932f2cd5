#include "base/copy.h"

namespace pycoll {

void copy_downwards(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kBlock = 64;
  while (bytes >= kBlock) {
    bytes -= kBlock;
    std::byte block[kBlock];
    std::memcpy(block, from + bytes, kBlock);
    std::memcpy(to + bytes, block, kBlock);
    __asm__ volatile("" ::: "memory");  // keeps the loop from becoming one memcpy again
  }
  std::memcpy(to, from, bytes);
}

}  // namespace pycoll
