// Methods of pycoll.Communicator that try the native call first. They use CPython's own interface,
// so a call creates no dictionary of arguments and no bound method.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>

#include "bindings/calls/collectives.h"

namespace pycoll::bindings {

// _core.Method: a descriptor in a class, like a function.
struct MethodObject {
  static constexpr std::size_t kNamesMax = 12;

  PyObject head;
  vectorcallfunc vectorcall;
  // The definition in Python; the native call must give the same result or error.
  PyObject* function;
  PyObject* wrapped;                     // signature and documentation come from here
  std::optional<Collective> collective;  // of the native call; nullopt: none exists
  // Parameters of the definition without self, in order.
  std::size_t name_count;
  std::size_t positional_count;
  std::array<PyObject*, kNamesMax> names;  // interned
  std::array<Parameter, kNamesMax> parameters;
  // The names `out` and `async_op`; nullptr unless the method is all_reduce.
  PyObject* out_name;
  PyObject* async_name;
};

// Sorts the arguments without self by parameter; false if only the definition can handle them.
[[nodiscard]] bool sort_arguments(const MethodObject& method, PyObject* const* arguments,
                                  std::size_t count, PyObject* names, Arguments* sorted);

// all_reduce(x, out=x), optionally followed by async_op=True: the most common call.
struct InPlace {
  PyObject* x = nullptr;  // borrowed; nullptr for every other call
  bool async = false;
};

// Arguments without self.
inline InPlace read_in_place(const MethodObject& method, PyObject* const* arguments,
                             std::size_t count, PyObject* names) {
  if (count != 1 || names == nullptr || method.out_name == nullptr ||
      PyTuple_GET_SIZE(names) == 0 || PyTuple_GET_ITEM(names, 0) != method.out_name ||
      arguments[1] != arguments[0]) {
    return {};
  }
  if (PyTuple_GET_SIZE(names) == 1) return {arguments[0], false};
  const bool async = PyTuple_GET_SIZE(names) == 2 &&
                     PyTuple_GET_ITEM(names, 1) == method.async_name && arguments[2] == Py_True;
  return {async ? arguments[0] : nullptr, async};
}

// Calls method(self, ...) in Python. If `count` has PY_VECTORCALL_ARGUMENTS_OFFSET, the callee may
// overwrite arguments[-1].
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
