// Calls that the cache knows, without Python code. Requires everywhere: the GIL.
#pragma once

#include <optional>

#include "bindings/calls/calls.h"

namespace pycoll::bindings {

// Runs the whole call. Returns a new reference, or nullptr with a Python error set. nullopt: native
// code cannot run the call, mostly because the cache does not know it; nothing was done. `hint`, if
// given, is tried before the cache, and receives the call that the cache finds.
[[nodiscard]] std::optional<PyObject*> call_natively(CallsObject* self, CallKind kind,
                                                     const Arguments& arguments,
                                                     CompiledCallHandle* hint = nullptr);
// Repeats method(x, out=x) if its words and array match the newest call of the method. Returns what
// call_natively() returns; nullopt also where only call_natively() can run the call.
[[nodiscard]] std::optional<PyObject*> repeat_in_place(CallsObject* self, CallKind kind,
                                                       PyObject* const* words, PyObject* x);

}  // namespace pycoll::bindings
