// The native half of pycoll. Functions release the GIL around everything that may wait.
#include <pybind11/pybind11.h>

namespace pycoll::bindings {

namespace py = pybind11;

// The parts of the module; each is defined in the source that it is about.
void bind_buffer(py::module_& module);
void bind_memory(py::module_& module);
void bind_plan(py::module_& module);
void bind_transports(py::module_& module);
void bind_communicator(py::module_& module);
void bind_native_calls(py::module_& module);
void bind_groups(py::module_& module);
void bind_kernels(py::module_& module);
void bind_codec(py::module_& module);
void bind_composed_kernels(py::module_& module);
void bind_row_kernels(py::module_& module);
void bind_simulation(py::module_& module);
void bind_xla(py::module_& module);
void bind_devices(py::module_& module);

}  // namespace pycoll::bindings

PYBIND11_MODULE(_core, module) {
  namespace bindings = pycoll::bindings;
  module.doc() = "Native engines of pycoll; use the pycoll package.";
#ifdef PYCOLL_LAID_OUT
  module.attr("LAID_OUT") = true;
#else
  module.attr("LAID_OUT") = false;
#endif
  bindings::bind_buffer(module);
  bindings::bind_memory(module);
  bindings::bind_plan(module);
  bindings::bind_transports(module);
  bindings::bind_communicator(module);
  bindings::bind_native_calls(module);
  bindings::bind_groups(module);
  bindings::bind_kernels(module);
  bindings::bind_codec(module);
  bindings::bind_composed_kernels(module);
  bindings::bind_row_kernels(module);
  bindings::bind_simulation(module);
  bindings::bind_xla(module);
  bindings::bind_devices(module);
}
