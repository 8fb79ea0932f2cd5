// The module that nvcc made of kernels.cu, as data; no_cuda.cpp where there is none.
#include "device/kernels.h"

asm(R"(
.section .rodata
.balign 64
.globl kPycollDeviceModule
.hidden kPycollDeviceModule
kPycollDeviceModule:
.incbin ")" PYCOLL_FATBIN R"("
.globl kPycollDeviceModuleEnd
.hidden kPycollDeviceModuleEnd
kPycollDeviceModuleEnd:
.byte 0
.previous
)");

extern "C" {
// A byte each of the assembler's, named here for their addresses.
extern const std::byte kPycollDeviceModule[];
extern const std::byte kPycollDeviceModuleEnd[];
}

namespace pycoll::device {

std::span<const std::byte> module_image() { return {kPycollDeviceModule, kPycollDeviceModuleEnd}; }

std::string module_summary() { return "kernels for " PYCOLL_CUDA_ARCHITECTURES; }

}  // namespace pycoll::device
