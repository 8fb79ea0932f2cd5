#include "device/kernels.h"

namespace pycoll::device {

std::string kernel_name(Protocol protocol, KernelKind kind) {
  constexpr const char* kProtocols[] = {"ll", "ll128", "simple"};
  constexpr const char* kKinds[] = {"any", "sum_float32", "sum_bfloat16", "sum_float16", "list"};
  return std::string("pycoll_") + kProtocols[static_cast<std::size_t>(protocol)] + "_" +
         kKinds[static_cast<std::size_t>(kind)];
}

}  // namespace pycoll::device
