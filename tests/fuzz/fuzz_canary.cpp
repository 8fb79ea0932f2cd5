// Must fail: it overruns its input once three bytes match, which takes coverage feedback to find
// and a sanitizer to notice. If this target survives, the other targets' silence means nothing.

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3 || data[0] != 'p' || data[1] != 'l' || data[2] != 'y') return 0;
  volatile std::uint8_t beyond = data[size];
  return beyond - beyond;
}
