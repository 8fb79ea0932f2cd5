#include "device/kernels/kernels.h"

#include <iterator>

namespace pycoll::device {
namespace {

constexpr const char* kProtocols[] = {"ll", "ll128", "simple", "pattern"};
static_assert(std::size(kProtocols) == kProtocolCount);

}  // namespace

const char* name_of(Protocol protocol) { return kProtocols[static_cast<std::size_t>(protocol)]; }

std::optional<Protocol> protocol_named(std::string_view name) {
  for (std::uint32_t i = 0; i < kProtocolCount; ++i) {
    if (name == kProtocols[i]) return static_cast<Protocol>(i);
  }
  return std::nullopt;
}

std::string kernel_name(Protocol protocol, KernelKind kind) {
  constexpr const char* kKinds[] = {"any", "sum_float32", "sum_bfloat16", "sum_float16", "list"};
  return std::string("pycoll_") + name_of(protocol) + "_" + kKinds[static_cast<std::size_t>(kind)];
}

}  // namespace pycoll::device
