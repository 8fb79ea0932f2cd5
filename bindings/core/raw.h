// Helpers for types that use CPython's own interface, where pybind11's argument handling would cost
// more than the work.
#pragma once

#include <pybind11/pybind11.h>
// Needs the include above.
#include <structmember.h>

#include <exception>
#include <optional>
#include <string_view>
#include <vector>

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

// Returns the result of `body`: a PyObject*, or an optional one. Exceptions become Python errors,
// with nullptr. Parks as or_park().
template <typename Body>
[[nodiscard]] auto guarded(const Body& body) -> decltype(body()) {
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

// A Python type whose objects are Objects, which begin with a PyObject. The garbage collector
// tracks the references `kOwned`, each of which may be nullptr. They are dropped when the collector
// breaks a cycle, after which Python may still use the object, and when the object ends. Members of
// Object that the type knows by their names:
//   forget()         drops what else the object owns; runs in front of dropping the references
//   vectorcall       nullptr afterwards: calls then raise TypeError
//   weak_references  cleared when the object ends
template <typename Object, PyObject* Object::*... kOwned>
struct CollectedType {
  static Object& of(PyObject* object) { return *reinterpret_cast<Object*>(object); }

  // Creates the type `name`, "module.Type", and adds it to the module. It lives as long as the
  // process. `end` must be `dealloc`, or call it or `clear`.
  static PyTypeObject* make(py::module_& module, const char* name, unsigned long flags,
                            std::vector<PyType_Slot> slots, destructor end = &dealloc) {
    slots.push_back({Py_tp_traverse, slot(&traverse)});
    slots.push_back({Py_tp_clear, slot(&clear)});
    slots.push_back({Py_tp_dealloc, slot(end)});
    slots.push_back({0, nullptr});
    PyType_Spec spec = {name, sizeof(Object), 0,
                        static_cast<unsigned>(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | flags),
                        slots.data()};
    PyObject* type = PyType_FromSpec(&spec);
    if (type == nullptr) throw py::error_already_set();
    const std::string_view word(name);
    module.attr(word.substr(word.rfind('.') + 1).data()) = py::reinterpret_borrow<py::object>(type);
    return reinterpret_cast<PyTypeObject*>(type);
  }

  static int traverse(PyObject* object, visitproc visit, void* arg) {
    int stopped = visit(reinterpret_cast<PyObject*>(Py_TYPE(object)), arg);
    const auto visit_one = [&](PyObject* owned) {
      if (stopped == 0 && owned != nullptr) stopped = visit(owned, arg);
    };
    (visit_one(of(object).*kOwned), ...);
    return stopped;
  }

  static int clear(PyObject* object) {
    Object& self = of(object);
    if constexpr (requires { self.vectorcall; }) self.vectorcall = nullptr;
    if constexpr (requires { self.forget(); }) self.forget();
    (drop(self.*kOwned), ...);
    return 0;
  }

  static void dealloc(PyObject* object) {
    PyObject_GC_UnTrack(object);
    const Object& self = of(object);
    if constexpr (requires { self.weak_references; }) {
      if (self.weak_references != nullptr) PyObject_ClearWeakRefs(object);
    }
    (void)clear(object);
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
  }

 private:
  static void drop(PyObject*& owned) { Py_CLEAR(owned); }
};

}  // namespace pycoll::bindings
