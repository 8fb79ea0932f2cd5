// Methods of pycoll.Communicator that try the native call first, and the same bound to a
// communicator: `comm.all_reduce`, and `comm.all_reduce.bind(...)`. They use CPython's own
// interface, so a call creates no dictionary of arguments and no bound method.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <utility>

#include "bindings/calls/known_calls.h"
#include "bindings/calls/offers.h"

namespace pycoll::bindings {

// _core.Method: a descriptor in a class, like a function.
struct MethodObject {
  PyObject head;
  vectorcallfunc vectorcall;
  // The definition in Python; the native call must give the same result or error.
  PyObject* function;
  PyObject* wrapped;             // signature and documentation come from here
  std::optional<CallKind> kind;  // of the native call; nullopt: none exists
  // Parameters of the definition without self, in order: interned names, and their numbers.
  std::size_t name_count;
  std::size_t positional_count;
  std::size_t required;  // the first ones, which have no default values
  std::array<PyObject*, kParameterCount> names;
  std::array<Parameter, kParameterCount> parameters;
  PyObject* out_name;  // the name `out`; nullptr unless the method takes x and `out`
  // Default values; nullptr where the definition has none. Owned.
  Arguments defaults;
};

// Sorts the arguments without self by parameter, with the default values of the definition; false
// if only the definition can read them.
[[nodiscard]] bool sort_arguments(const MethodObject& method, PyObject* const* arguments,
                                  std::size_t count, PyObject* names, Arguments* sorted);

// Whether the arguments without self are (x, out=x), with default values otherwise: the most common
// call.
inline bool is_in_place(const MethodObject& method, PyObject* const* arguments, std::size_t count,
                        PyObject* names) {
  return PyVectorcall_NARGS(count) == 1 && names != nullptr && PyTuple_GET_SIZE(names) == 1 &&
         PyTuple_GET_ITEM(names, 0) == method.out_name && arguments[1] == arguments[0];
}

// The whole call: natively if the cache knows it; otherwise the result of `definition`, a function
// that calls the definition.
template <typename Definition>
[[nodiscard]] PyObject* call_sorted(CallsObject* self, CallKind kind, const Arguments& sorted,
                                    CompiledCallHandle* hint, const Definition& definition) {
  const std::optional<PyObject*> result = call_natively(self, kind, sorted, hint);
  if (result) return *result;
  return run_definition({self, kind, sorted}, definition);
}

// method.__get__(self): `self.name`, and `self.name.bind`. Without self, the method of the world. A
// new reference, or nullptr with an error set.
[[nodiscard]] PyObject* bind_method(MethodObject* method, PyObject* self);

// The method of the world's communicator. `find` is a Python function that returns the
// communicator, or raises if none is set. A new reference, or nullptr with an error set.
[[nodiscard]] PyObject* bind_to_world(MethodObject* method, PyObject* find);

void bind_bound_methods(pybind11::module_& module);

}  // namespace pycoll::bindings
