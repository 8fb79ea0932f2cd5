#include <string>

#include "bindings/bind.h"
#include "kernels/reduce.h"

namespace pycoll::bindings {

void bind_kernels(py::module_& module) {
  module.def(
      "isa", [] { return std::string(kernels::name_of(kernels::best_isa())); },
      "The instruction set that the reduction kernels use: portable, avx2 or avx512.");
  module.def(
      "defined",
      [](int dtype, int op) {
        return kernels::defined(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      },
      py::arg("dtype"), py::arg("op"), "Whether the reduction means something for the dtype.");
}

}  // namespace pycoll::bindings
