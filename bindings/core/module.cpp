// The native half of pycoll. Functions release the GIL around everything that may wait.
#include "bindings/core/bind.h"

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
