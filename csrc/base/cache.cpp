#include "base/cache.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace pycoll {
namespace {

// Bytes of cache `index` of the first core; 0 if unknown. sysconf() is not used, because on some
// processors it returns the sum over all parts of the processor.
std::size_t cache_bytes(int index) {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
  std::size_t kibibytes = 0;
  file >> kibibytes;
  return kibibytes << 10;
}

}  // namespace

std::size_t core_cache_bytes() {
  constexpr std::size_t kUsual = std::size_t{1} << 20;
  static const std::size_t found = cache_bytes(2);
  return found > 0 ? found : kUsual;
}

std::size_t shared_cache_bytes() {
  static const std::size_t found = cache_bytes(3);
  return found;
}

std::size_t uncached_bytes(std::size_t ranks) {
  constexpr std::size_t kCoreCaches = 8, kSharedPart = 3;
  return std::max(kCoreCaches * core_cache_bytes(), shared_cache_bytes() / kSharedPart / ranks);
}

}  // namespace pycoll
