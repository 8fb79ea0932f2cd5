// Methods of pycoll.Communicator that try the native call first. They use CPython's own interface,
// so a call creates no dictionary of arguments and no bound method.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <utility>

#include "bindings/calls/calls.h"

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

  void forget();
};

// The call method(self, ...), natively if the cache knows it; otherwise by the definition.
// `arguments`: without self. If `count` has PY_VECTORCALL_ARGUMENTS_OFFSET, arguments[-1] may hold
// self during the call.
[[nodiscard]] PyObject* call_method(const MethodObject& method, PyObject* self,
                                    PyObject* const* arguments, std::size_t count, PyObject* names);

// Sorts the arguments without self by parameter, with the default values of the definition; false
// if only the definition can read them.
[[nodiscard]] bool sort_arguments(const MethodObject& method, PyObject* const* arguments,
                                  std::size_t count, PyObject* names, Arguments* sorted);

// The same for arguments that sort_arguments() has sorted. `hint`: as for call_natively().
[[nodiscard]] PyObject* call_sorted(const MethodObject& method, PyObject* self,
                                    PyObject* const* arguments, std::size_t count, PyObject* names,
                                    const Arguments& sorted, CompiledCallHandle* hint);

// Calls method(self, ...) in Python; `arguments` and `count` as for call_method().
[[nodiscard]] PyObject* call_definition(const MethodObject& method, PyObject* self,
                                        PyObject* const* arguments, std::size_t count,
                                        PyObject* names);

[[nodiscard]] MethodObject* as_method(PyObject* object);  // nullptr unless it is a _core.Method

// method.__get__(self): `self.name`, and `self.name.bind`. Without self, the method of the world. A
// new reference, or nullptr with an error set.
[[nodiscard]] PyObject* bind_method(MethodObject* method, PyObject* self);

void bind_methods(pybind11::module_& module);
void bind_bound_methods(pybind11::module_& module);

}  // namespace pycoll::bindings
