#include "bindings/calls/bound_method.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "bindings/core/gil.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {
namespace {

struct BoundObject {
  PyObject head;
  vectorcallfunc vectorcall;
  PyObject* method;
  PyObject* self;  // nullptr: the world's communicator, looked up at each call
  PyObject* weak_references;
};

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
  CompiledCallHandle compiled;  // the call that the cache found last
};

PyTypeObject* bound_type = nullptr;
PyTypeObject* bound_call_type = nullptr;

BoundObject* cast_bound(PyObject* object) { return reinterpret_cast<BoundObject*>(object); }
BoundCallObject* as_bound_call(PyObject* object) {
  return reinterpret_cast<BoundCallObject*>(object);
}
MethodObject& method_of(PyObject* object) {
  return *reinterpret_cast<MethodObject*>(cast_bound(object)->method);
}

// The communicator of the method; empty with an error set if there is no world.
py::object self_of(PyObject* object) {
  PyObject* self = cast_bound(object)->self != nullptr ? cast_bound(object)->self : world;
  if (self != nullptr) return py::reinterpret_borrow<py::object>(self);
  return py::reinterpret_steal<py::object>(call_python(find_world, nullptr, 0, nullptr));
}

// Calls method(self, ...) in Python. If `count` has PY_VECTORCALL_ARGUMENTS_OFFSET, the callee may
// overwrite arguments[-1].
PyObject* call_definition(const MethodObject& method, PyObject* self, PyObject* const* arguments,
                          std::size_t count, PyObject* names) {
  const auto positional = static_cast<std::size_t>(PyVectorcall_NARGS(count));
  const std::size_t named =
      names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(names));
  std::vector<PyObject*> all{nullptr, self};
  all.insert(all.end(), arguments, arguments + positional + named);
  return call_python(method.function, all.data() + 1,
                     (positional + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

// ---- self.name

PyObject* call_bound(PyObject* object, PyObject* const* arguments, std::size_t count,
                     PyObject* names) {
  const MethodObject& method = method_of(object);
  const py::object held = self_of(object);
  PyObject* self = held.ptr();
  if (self == nullptr) return nullptr;
  const auto definition = [&] { return call_definition(method, self, arguments, count, names); };
  CallsObject* calls = as_calls(self);
  if (calls == nullptr || !method.kind) return definition();
  const CallKind kind = *method.kind;
  if (is_in_place(method, arguments, count, names)) {
    const std::optional<PyObject*> result =
        repeat_in_place(calls, kind, method.defaults.data(), arguments[0]);
    if (result) return *result;
  }
  Arguments sorted;
  const auto given = static_cast<std::size_t>(PyVectorcall_NARGS(count));
  if (!sort_arguments(method, arguments, given, names, &sorted)) return definition();
  return call_sorted(calls, kind, sorted, nullptr, definition);
}

int traverse_bound(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(cast_bound(object)->method);
  Py_VISIT(cast_bound(object)->self);
  return 0;
}

int clear_bound(PyObject* object) {
  Py_CLEAR(cast_bound(object)->method);
  Py_CLEAR(cast_bound(object)->self);
  return 0;
}

void dealloc_bound(PyObject* object) {
  PyObject_GC_UnTrack(object);
  if (cast_bound(object)->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  (void)clear_bound(object);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
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
  const auto definition = [&] {
    const Py_ssize_t named = bound->names == nullptr ? 0 : PyTuple_GET_SIZE(bound->names);
    const Py_ssize_t positional = PyTuple_GET_SIZE(bound->arguments) - named;
    return call_definition(method, bound->self, &PyTuple_GET_ITEM(bound->arguments, 0),
                           static_cast<std::size_t>(positional), bound->names);
  };
  if (!bound->is_sorted || !method.kind) return definition();
  return call_sorted(as_calls(bound->self), *method.kind, bound->sorted, &bound->compiled,
                     definition);
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

int traverse_bound_call(PyObject* object, visitproc visit, void* arg) {
  const BoundCallObject* bound = as_bound_call(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(bound->method);
  Py_VISIT(bound->self);
  Py_VISIT(bound->arguments);
  return 0;
}

int clear_bound_call(PyObject* object) {
  BoundCallObject* bound = as_bound_call(object);
  bound->vectorcall = nullptr;
  Py_CLEAR(bound->method);
  Py_CLEAR(bound->self);
  Py_CLEAR(bound->arguments);
  Py_CLEAR(bound->names);
  return 0;
}

void dealloc_bound_call(PyObject* object) {
  PyObject_GC_UnTrack(object);
  (void)clear_bound_call(object);
  as_bound_call(object)->compiled.~CompiledCallHandle();
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
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

PyObject* keep_as_it_is(PyObject* object, PyObject* /*self*/, PyObject* /*type*/) {
  return Py_NewRef(object);
}

}  // namespace

bool sort_arguments(const MethodObject& method, PyObject* const* arguments, std::size_t count,
                    PyObject* names, Arguments* sorted) {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count > method.positional_count) return false;
  *sorted = method.defaults;
  std::size_t missing = method.required;
  for (std::size_t one = 0; one < count; ++one) {
    (*sorted)[static_cast<std::size_t>(method.parameters[one])] = arguments[one];
  }
  missing -= std::min(missing, count);
  for (Py_ssize_t one = 0; one < named; ++one) {
    // Names in program text are interned; calls with other names go to the definition.
    PyObject* name = PyTuple_GET_ITEM(names, one);
    PyObject* const* first = method.names.data();
    PyObject* const* last = first + method.name_count;
    PyObject* const* found = std::find(first + count, last, name);
    if (found == last) return false;
    const auto number = static_cast<std::size_t>(found - first);
    if (number < method.required) --missing;
    (*sorted)[static_cast<std::size_t>(method.parameters[number])] =
        arguments[count + static_cast<std::size_t>(one)];
  }
  return missing == 0;
}

PyObject* bind_method(MethodObject* method, PyObject* self) {
  PyObject* object = bound_type->tp_alloc(bound_type, 0);
  if (object == nullptr) return nullptr;
  cast_bound(object)->vectorcall = &call_bound;
  cast_bound(object)->method = Py_NewRef(reinterpret_cast<PyObject*>(method));
  cast_bound(object)->self = Py_XNewRef(self);
  return object;
}

PyObject* bind_to_world(MethodObject* method, PyObject* find) {
  Py_XSETREF(find_world, Py_NewRef(find));
  return bind_method(method, nullptr);
}

void bind_bound_methods(py::module_& module) {
  constexpr unsigned long kFlags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | kNotMadeByCalling;
  PyType_Slot slots[] = {{Py_tp_dealloc, slot(&dealloc_bound)},
                         {Py_tp_traverse, slot(&traverse_bound)},
                         {Py_tp_clear, slot(&clear_bound)},
                         {Py_tp_call, slot(&PyVectorcall_Call)},
                         {Py_tp_descr_get, slot(&keep_as_it_is)},
                         {Py_tp_getattro, slot(&get_attribute_bound)},
                         {Py_tp_repr, slot(&represent_bound)},
                         {Py_tp_richcompare, slot(&compare)},
                         {Py_tp_hash, slot(&hash)},
                         {Py_tp_members, bound_members},
                         {Py_tp_getset, bound_properties},
                         {Py_tp_methods, bound_methods},
                         {0, nullptr}};
  PyType_Spec spec = {"pycoll._core.BoundMethod", sizeof(BoundObject), 0, kFlags, slots};
  bound_type = add_type(module, "BoundMethod", spec);
  PyType_Slot bound_call_slots[] = {
      {Py_tp_dealloc, slot(&dealloc_bound_call)},
      {Py_tp_repr, slot(&represent_bound_call)},
      {Py_tp_traverse, slot(&traverse_bound_call)},
      {Py_tp_clear, slot(&clear_bound_call)},
      {Py_tp_call, slot(&PyVectorcall_Call)},
      {Py_tp_members, bound_call_members},
      {Py_tp_doc, text("A call with its arguments, as returned by a method's bind().")},
      {0, nullptr}};
  PyType_Spec bound_call_spec = {"pycoll._core.BoundCall", sizeof(BoundCallObject), 0, kFlags,
                                 bound_call_slots};
  bound_call_type = add_type(module, "BoundCall", bound_call_spec);
  module.def("set_world", &set_world, py::arg("communicator"),
             "Set the communicator of the functions of world_function(), or None.");
}

}  // namespace pycoll::bindings
