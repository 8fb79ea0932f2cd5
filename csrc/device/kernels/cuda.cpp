// Embeds the module that nvcc made of kernels.cu; no_cuda.cpp replaces this file where there is
// none.
#include "device/kernels/kernels.h"

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
// One byte each, defined by the assembler; only their addresses are used.
extern const std::byte kPycollDeviceModule[];
extern const std::byte kPycollDeviceModuleEnd[];
}

namespace pycoll::device {

std::span<const std::byte> module_image() { return {kPycollDeviceModule, kPycollDeviceModuleEnd}; }

std::string module_summary() { return "kernels for " PYCOLL_CUDA_ARCHITECTURES; }

}  // namespace pycoll::device
