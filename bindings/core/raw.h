// Helpers for types that use CPython's own interface, where pybind11's argument handling would cost
// more than the work.
#pragma once

#include <pybind11/pybind11.h>
// Needs the include above.
#include <structmember.h>

#include <exception>

#include "bindings/core/gil.h"

namespace pycoll::bindings {

namespace py = pybind11;

inline constexpr unsigned long kNotMadeByCalling = Py_TPFLAGS_DISALLOW_INSTANTIATION;

// Slots of C hold functions of every type as one pointer type.
template <typename Function>
void* slot(Function* function) noexcept {
  return reinterpret_cast<void*>(function);
}
template <typename Function>
PyCFunction as_c_function(Function* function) noexcept {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}
inline void* text(const char* words) { return const_cast<char*>(words); }

// Returns the result of `body`. Exceptions become Python errors, with nullptr. Parks as or_park().
template <typename Body>
[[nodiscard]] PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const abi::__forced_unwind&) {
    park();
  }
  return nullptr;
}

// Creates the type and adds it to the module. The type lives as long as the process.
inline PyTypeObject* add_type(py::module_& module, const char* name, PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  module.attr(name) = py::reinterpret_borrow<py::object>(type);
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace pycoll::bindings
