// Known all_reduces of several arrays: in a group, which ends later, or in a list, which runs at
// once. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/calls/calls.h"

namespace pycoll::bindings {

// A known all_reduce inside a group: a Work, or nullptr with an error set; nullopt as in
// call_natively().
[[nodiscard]] std::optional<PyObject*> defer(CallsObject* self, const CompiledCallHandle& compiled,
                                             const ParsedCall& parsed);

// The operation of a fusion; Python compiles it if it is unknown.
[[nodiscard]] OperationHandle compile_fusion(CallsObject* self, Fusions& fusions,
                                             std::size_t number);
// Runs one fusion, which it compiles if necessary, and fills its Works. Throws on failure.
void run_fusion(CallsObject* self, Fusions& fusions, std::size_t number);

inline bool is_list(PyObject* x) {
  return x != nullptr && (PyList_CheckExact(x) || PyTuple_CheckExact(x));
}
// The current items of the list, independent of later changes.
pybind11::tuple items_of(PyObject* list);
// Runs an all_reduce of a list or tuple of arrays to its end, if each of them alone is known. A new
// list, or `out`; otherwise as call_natively().
[[nodiscard]] std::optional<PyObject*> run_list(CallsObject* self, const Arguments& arguments);

void bind_fused_calls(pybind11::module_& module);

}  // namespace pycoll::bindings
