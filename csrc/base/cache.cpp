#include "base/cache.h"

#include <fstream>

namespace pycoll {
namespace {

// sysconf() would add up what the parts of a processor have, on some processors eightfold.
std::size_t found() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index2/size");
  std::size_t kibibytes = 0;
  file >> kibibytes;
  constexpr std::size_t kUsual = std::size_t{1} << 10;
  return (kibibytes > 0 ? kibibytes : kUsual) << 10;
}

}  // namespace

std::size_t core_cache_bytes() {
  static const std::size_t bytes = found();
  return bytes;
}

}  // namespace pycoll
