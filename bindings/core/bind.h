// Functions that the files of this folder share. Code below this folder uses no exceptions and no
// Python. Here every Status becomes an exception of pycoll.errors, in one place.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "transport/transport.h"

namespace pycoll::bindings {

namespace py = pybind11;

// Throws the exception of pycoll.errors for `status`; returns if it is ok. If a Python error is
// already pending (Ctrl-C during a wait), that error is thrown instead. `names`: "host:pid" of the
// ranks, from which the exception gets its host. Requires: the GIL.
void raise_if_failed(const Status& status, std::string_view operation,
                     const std::vector<std::string>& names = {});

// A transport as Python holds it; shared with the communicator.
struct TransportHandle {
  std::shared_ptr<transport::Transport> transport;
};

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
