// Methods bound to a communicator: `comm.all_reduce`, and `comm.all_reduce.bind(...)`.

#include <cstddef>
#include <new>

#include "bindings/calls/method.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {
namespace {

// A method with its object.
struct BoundObject {
  PyObject head;
  vectorcallfunc vectorcall;
  PyObject* method;
  PyObject* self;  // nullptr: the world's communicator, looked up at each call
  PyObject* weak_references;
};
using BoundType = CollectedType<BoundObject, &BoundObject::method, &BoundObject::self>;

// The communicator of module functions, and the function that finds it or raises while none is set.
PyObject* world = nullptr;
PyObject* find_world = nullptr;

// A method with its object and arguments. `sorted` borrows from `arguments`.
struct BoundCallObject {
  PyObject head;
  vectorcallfunc vectorcall;
  PyObject* method;
  PyObject* self;
  PyObject* arguments;  // a tuple: positional arguments, then named ones
  PyObject* names;      // a tuple of the names of the named arguments, or nullptr
  bool is_sorted;
  Arguments sorted;
  CompiledCallHandle compiled;  // what it did last

  void forget() { compiled.reset(); }
};
using BoundCallType =
    CollectedType<BoundCallObject, &BoundCallObject::method, &BoundCallObject::self,
                  &BoundCallObject::arguments, &BoundCallObject::names>;

PyTypeObject* bound_type = nullptr;
PyTypeObject* bound_call_type = nullptr;

BoundObject* cast_bound(PyObject* object) { return &BoundType::of(object); }
BoundCallObject* as_bound_call(PyObject* object) { return &BoundCallType::of(object); }
MethodObject& method_of(PyObject* object) {
  return *reinterpret_cast<MethodObject*>(cast_bound(object)->method);
}

// The communicator of the method; empty with an error set if there is no world.
py::object self_of(PyObject* object) {
  PyObject* self = cast_bound(object)->self != nullptr ? cast_bound(object)->self : world;
  if (self != nullptr) return py::reinterpret_borrow<py::object>(self);
  return py::reinterpret_steal<py::object>(call_python(find_world, nullptr, 0, nullptr));
}

// ---- self.name

PyObject* call_bound(PyObject* object, PyObject* const* arguments, std::size_t count,
                     PyObject* names) {
  const py::object self = self_of(object);
  if (!self) return nullptr;
  return call_method(method_of(object), self.ptr(), arguments, count, names);
}

PyObject* get_attribute_bound(PyObject* object, PyObject* name) {
  // Not a property of the type, because that would hide the type's own __module__.
  if (PyUnicode_CompareWithASCIIString(name, "__module__") == 0) {
    return PyObject_GetAttr(method_of(object).wrapped, name);
  }
  PyObject* own = PyObject_GenericGetAttr(object, name);
  if (own != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return own;
  PyErr_Clear();
  return PyObject_GetAttr(method_of(object).wrapped, name);
}

PyObject* get_documentation_bound(PyObject* object, void* /*unused*/) {
  return PyObject_GetAttrString(method_of(object).wrapped, "__doc__");
}

// The definition, bound as Python would bind it.
py::object python_method(PyObject* object) {
  PyObject* self = cast_bound(object)->self != nullptr ? cast_bound(object)->self : object;
  return py::module_::import("types").attr("MethodType")(py::handle(method_of(object).wrapped),
                                                         py::handle(self));
}

PyObject* get_signature(PyObject* object, void* /*unused*/) {
  return guarded([&] {
    return py::module_::import("inspect").attr("signature")(python_method(object)).release().ptr();
  });
}

PyObject* represent_bound(PyObject* object) {
  return guarded([&] {
    if (cast_bound(object)->self != nullptr) return py::repr(python_method(object)).release().ptr();
    const py::object name = py::handle(method_of(object).wrapped).attr("__name__");
    return py::str("<function pycoll.{}>").format(name).release().ptr();
  });
}

PyObject* compare(PyObject* one, PyObject* other, int operation) {
  if ((operation != Py_EQ && operation != Py_NE) || !Py_IS_TYPE(other, bound_type)) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const bool same = cast_bound(one)->self == cast_bound(other)->self &&
                    cast_bound(one)->method == cast_bound(other)->method;
  return py::bool_(same == (operation == Py_EQ)).release().ptr();
}

Py_hash_t hash(PyObject* object) {
  return static_cast<Py_hash_t>((reinterpret_cast<std::uintptr_t>(cast_bound(object)->self) >> 4) ^
                                reinterpret_cast<std::uintptr_t>(cast_bound(object)->method) >> 4);
}

// ---- self.name.bind(...)

PyObject* run_bound(PyObject* object, PyObject* const* /*arguments*/, std::size_t count,
                    PyObject* names) {
  BoundCallObject* bound = as_bound_call(object);
  if (PyVectorcall_NARGS(count) != 0 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "a bound operation takes no arguments: bind() took them");
    return nullptr;
  }
  const auto& method = *reinterpret_cast<MethodObject*>(bound->method);
  const Py_ssize_t named = bound->names == nullptr ? 0 : PyTuple_GET_SIZE(bound->names);
  const auto given = static_cast<std::size_t>(PyTuple_GET_SIZE(bound->arguments) - named);
  PyObject* const* all = &PyTuple_GET_ITEM(bound->arguments, 0);
  if (!bound->is_sorted) return call_definition(method, bound->self, all, given, bound->names);
  return call_sorted(method, bound->self, all, given, bound->names, bound->sorted,
                     &bound->compiled);
}

// Raises the TypeError of a call whose arguments do not fit the parameters.
void check_fit(PyObject* object, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  py::list positional;
  for (Py_ssize_t one = 0; one < count; ++one) positional.append(py::handle(arguments[one]));
  py::dict named;
  const Py_ssize_t named_count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t one = 0; one < named_count; ++one) {
    named[py::handle(PyTuple_GET_ITEM(names, one))] = py::handle(arguments[count + one]);
  }
  py::module_::import("inspect")
      .attr("signature")(python_method(object))
      .attr("bind")(*positional, **named);
}

PyObject* bind(PyObject* object, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  return guarded([&]() -> PyObject* {
    check_fit(object, arguments, count, names);
    py::object self = self_of(object);
    if (!self) return nullptr;
    PyObject* made = bound_call_type->tp_alloc(bound_call_type, 0);
    if (made == nullptr) return nullptr;
    BoundCallObject* bound = as_bound_call(made);
    new (&bound->compiled) CompiledCallHandle();
    bound->vectorcall = &run_bound;
    bound->method = Py_NewRef(cast_bound(object)->method);
    bound->self = self.release().ptr();
    const Py_ssize_t all = count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
    auto kept = py::tuple(static_cast<std::size_t>(all));
    for (Py_ssize_t one = 0; one < all; ++one) {
      PyTuple_SET_ITEM(kept.ptr(), one, Py_NewRef(arguments[one]));
    }
    bound->arguments = kept.release().ptr();
    bound->names = Py_XNewRef(names);
    bound->is_sorted = method_of(object).kind && as_calls(bound->self) != nullptr &&
                       sort_arguments(method_of(object), &PyTuple_GET_ITEM(bound->arguments, 0),
                                      static_cast<std::size_t>(count), names, &bound->sorted);
    return made;
  });
}

PyObject* represent_bound_call(PyObject* object) {
  return guarded([&] {
    const auto& method = *reinterpret_cast<MethodObject*>(as_bound_call(object)->method);
    const py::object name = py::handle(method.wrapped).attr("__qualname__");
    return py::str("<bound call of {}>").format(name).release().ptr();
  });
}

// ---- The types

PyMemberDef bound_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(BoundObject, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(BoundObject, weak_references), READONLY, nullptr},
    {"__self__", T_OBJECT, offsetof(BoundObject, self), READONLY, nullptr},
    {"__func__", T_OBJECT, offsetof(BoundObject, method), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef bound_properties[] = {{"__doc__", &get_documentation_bound, nullptr, nullptr, nullptr},
                                  {"__signature__", &get_signature, nullptr, nullptr, nullptr},
                                  {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef bound_methods[] = {
    {"bind", as_c_function(&bind), METH_FASTCALL | METH_KEYWORDS,
     "Prepare this call for repeated use: op = comm.all_reduce.bind(x, out=x), then op(). Every\n"
     "op() reads the arrays anew, and raises the same errors as the call itself."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef bound_call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(BoundCallObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

void set_world(const py::object& communicator) {
  PyObject* last = world;
  world = communicator.is_none() ? nullptr : Py_NewRef(communicator.ptr());
  Py_XDECREF(last);
}

py::object make_world_function(const py::object& function, const py::function& find) {
  MethodObject* method = as_method(function.ptr());
  if (method == nullptr) throw py::type_error("world_function() takes a _core.Method");
  Py_XSETREF(find_world, Py_NewRef(find.ptr()));
  return py::reinterpret_steal<py::object>(bind_method(method, nullptr));
}

PyObject* keep_as_it_is(PyObject* object, PyObject* /*self*/, PyObject* /*type*/) {
  return Py_NewRef(object);
}

}  // namespace

PyObject* bind_method(MethodObject* method, PyObject* self) {
  PyObject* object = bound_type->tp_alloc(bound_type, 0);
  if (object == nullptr) return nullptr;
  cast_bound(object)->vectorcall = &call_bound;
  cast_bound(object)->method = Py_NewRef(reinterpret_cast<PyObject*>(method));
  cast_bound(object)->self = Py_XNewRef(self);
  return object;
}

void bind_bound_methods(py::module_& module) {
  constexpr unsigned long kFlags = Py_TPFLAGS_HAVE_VECTORCALL | kNotMadeByCalling;
  bound_type = BoundType::make(module, "pycoll._core.BoundMethod", kFlags,
                               {{Py_tp_call, slot(&PyVectorcall_Call)},
                                {Py_tp_descr_get, slot(&keep_as_it_is)},
                                {Py_tp_getattro, slot(&get_attribute_bound)},
                                {Py_tp_repr, slot(&represent_bound)},
                                {Py_tp_richcompare, slot(&compare)},
                                {Py_tp_hash, slot(&hash)},
                                {Py_tp_members, bound_members},
                                {Py_tp_getset, bound_properties},
                                {Py_tp_methods, bound_methods}});
  bound_call_type = BoundCallType::make(
      module, "pycoll._core.BoundCall", kFlags,
      {{Py_tp_repr, slot(&represent_bound_call)},
       {Py_tp_call, slot(&PyVectorcall_Call)},
       {Py_tp_members, bound_call_members},
       {Py_tp_doc, text("A call with its arguments, as returned by a method's bind().")}});
  module.def("set_world", &set_world, py::arg("communicator"),
             "Set the communicator of the functions of world_function(), or None.");
  module.def(
      "world_function", &make_world_function, py::arg("method"), py::arg("find"),
      "The method of the world's communicator; find() returns that, or raises if none is set.");
}

}  // namespace pycoll::bindings
