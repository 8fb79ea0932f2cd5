// Stands for cuda.cpp where no nvcc was found when pycoll was built, or none was wanted.
#include "device/kernels.h"

namespace pycoll::device {

std::span<const std::byte> module_image() { return {}; }

std::string module_summary() { return "not part of this build: nvcc was not found or not wanted"; }

}  // namespace pycoll::device
