// The native state of a communicator's calls. Python defines every operation: it reads and checks
// the arguments of a call, and reports the operation to native code (offers.h). Native code repeats
// the operation for later calls with an equal key (known_calls.h). All other calls go to Python.
// Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "bindings/calls/call_cache.h"
#include "bindings/calls/fusion_memory.h"
#include "bindings/calls/fusions.h"
#include "bindings/core/handle.h"

namespace pycoll::bindings {

namespace py = pybind11;

// The native state of a communicator.
struct CallState {
  explicit CallState(SharedHandle shared);

  // Empty Fusions for a list or a group, which gives them back empty. Their capacity is reused.
  [[nodiscard]] std::unique_ptr<Fusions> take_fusions();
  void give_back(std::unique_ptr<Fusions> fusions);

  SharedHandle handle;
  CallCache cache;
  FusionMemory memory;

 private:
  std::unique_ptr<Fusions> spare_;
};

// _core.Calls, the base of pycoll.comm.communicator.Communicator.
struct CallsObject {
  PyObject head;
  PyObject* native;  // _core.Communicator, or nullptr
  PyObject* group;   // the group in progress, or None
  Fusions* fusions;  // of that group, or nullptr
  CallState* state;  // nullptr without `native`
};

// nullptr unless `object` is a _core.Calls.
[[nodiscard]] CallsObject* as_calls(PyObject* object);
// Throws TypeError unless `object` is a communicator.
[[nodiscard]] CallsObject& need_calls(const py::object& object);

inline py::handle as_handle(CallsObject* self) { return reinterpret_cast<PyObject*>(self); }

// The new array that a call returns, as make_flat(). Requires: compiled.makes.
[[nodiscard]] inline PyObject* make_result(const CompiledCall& compiled, const ParsedCall& parsed,
                                           ContiguousView* flat) {
  return make_flat(parsed.x, compiled.dtype, static_cast<int>(compiled.shape.size()),
                   compiled.shape.data(), flat);
}
OperationHandle operation_of(const RequestHandle& request, std::uint64_t input_bytes,
                             std::uint64_t output_bytes);

void bind_calls(py::module_& module);

}  // namespace pycoll::bindings
