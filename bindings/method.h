// Methods of pycoll.Communicator that try the native way first. Written with CPython's own
// interface: a call costs no dictionary of arguments and no bound method.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>

#include "bindings/collectives.h"

namespace pycoll::bindings {

// _core.Method: a descriptor in a class, as functions are.
struct MethodObject {
  static constexpr std::size_t kNamesMax = 12;

  PyObject head;
  vectorcallfunc vectorcall;
  PyObject* function;  // the definition: what it gives and raises is what a call gives and raises
  PyObject* wrapped;   // whose signature and documentation it has
  std::optional<Collective> collective;  // of the native way; none: there is no such way
  // The definition's parameters behind self, in order.
  std::size_t name_count;
  std::size_t positional_count;
  std::array<PyObject*, kNamesMax> names;  // interned
  std::array<Parameter, kNamesMax> parameters;
  // Of those, `out` and `async_op`; nullptr unless it is an all_reduce.
  PyObject* out_name;
  PyObject* async_name;
};

// Sorts arguments, self apart, by parameter; false for what only the definition can judge.
[[nodiscard]] bool sort_arguments(const MethodObject& method, PyObject* const* arguments,
                                  std::size_t count, PyObject* names, Arguments* sorted);

// all_reduce(x, out=x), or with async_op=True behind that, as most programs write it.
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

// method(self, ...) without the native way: arguments[-1] is room of the caller's if `count` has
// PY_VECTORCALL_ARGUMENTS_OFFSET.
[[nodiscard]] PyObject* call_definition(const MethodObject& method, PyObject* self,
                                        PyObject* const* arguments, std::size_t count,
                                        PyObject* names);

[[nodiscard]] MethodObject* as_method(PyObject* object);  // nullptr unless it is one

// method.__get__(self): `self.name`, and `self.name.bind`; without self the world's. A new
// reference, or nullptr with an error set.
[[nodiscard]] PyObject* bind_method(MethodObject* method, PyObject* self);

void bind_methods(pybind11::module_& module);
void bind_bound_methods(pybind11::module_& module);

}  // namespace pycoll::bindings
