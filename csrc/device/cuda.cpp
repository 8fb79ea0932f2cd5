// The module that nvcc made of kernels.cu, as data; no_cuda.cpp where there is none.
#include "device/kernels.h"

asm(R"(
.section .rodata
.balign 64
.globl pycoll_device_module
.hidden pycoll_device_module
pycoll_device_module:
.incbin ")" PYCOLL_FATBIN R"("
.globl pycoll_device_module_end
.hidden pycoll_device_module_end
pycoll_device_module_end:
.byte 0
.previous
)");

extern "C" {
// A byte each of the assembler's, named here for their addresses.
extern const std::byte pycoll_device_module[];
extern const std::byte pycoll_device_module_end[];
}

namespace pycoll::device {

std::span<const std::byte> module_image() {
  return {pycoll_device_module, pycoll_device_module_end};
}

std::string module_summary() { return "kernels for " PYCOLL_CUDA_ARCHITECTURES; }

}  // namespace pycoll::device
