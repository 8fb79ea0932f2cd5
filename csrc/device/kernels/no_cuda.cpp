// Replaces cuda.cpp in builds without CUDA kernels: nvcc was not found or not wanted.
#include "device/kernels/kernels.h"

namespace pycoll::device {

std::span<const std::byte> module_image() { return {}; }

std::string module_summary() { return "not part of this build: nvcc was not found or not wanted"; }

}  // namespace pycoll::device
