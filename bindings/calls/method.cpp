// Methods of pycoll.Communicator that are not bound to a communicator, and the list of the native
// calls.
#include <algorithm>
#include <cstddef>
#include <new>
#include <string>

#include "bindings/arrays/flat.h"
#include "bindings/calls/bound_method.h"
#include "bindings/calls/fused_calls.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"
#include "bindings/core/work.h"

namespace pycoll::bindings {
namespace {

PyTypeObject* method_type = nullptr;

MethodObject* cast_method(PyObject* object) { return reinterpret_cast<MethodObject*>(object); }

PyObject* call_method(PyObject* object, PyObject* const* arguments, std::size_t count,
                      PyObject* names) {
  const MethodObject& method = *cast_method(object);
  const auto given = static_cast<std::size_t>(PyVectorcall_NARGS(count));
  const auto definition = [&] { return call_python(method.function, arguments, count, names); };
  CallsObject* self = given > 0 ? as_calls(arguments[0]) : nullptr;
  if (self == nullptr || !method.kind) return definition();
  const CallKind kind = *method.kind;
  if (is_in_place(method, arguments + 1, given - 1, names)) {
    const std::optional<PyObject*> result =
        repeat_in_place(self, kind, method.defaults.data(), arguments[1]);
    if (result) return *result;
  }
  Arguments sorted;
  if (!sort_arguments(method, arguments + 1, given - 1, names, &sorted)) return definition();
  return call_sorted(self, kind, sorted, nullptr, definition);
}

PyObject* get(PyObject* object, PyObject* self, PyObject* /*type*/) {
  if (self == nullptr) return Py_NewRef(object);
  return bind_method(cast_method(object), self);
}

int traverse_method(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(cast_method(object)->function);
  Py_VISIT(cast_method(object)->wrapped);
  return 0;
}

int clear_method(PyObject* object) {
  Py_CLEAR(cast_method(object)->function);
  Py_CLEAR(cast_method(object)->wrapped);
  return 0;
}

void dealloc_method(PyObject* object) {
  PyObject_GC_UnTrack(object);
  (void)clear_method(object);
  for (std::size_t one = 0; one < cast_method(object)->name_count; ++one) {
    Py_DECREF(cast_method(object)->names[one]);
  }
  for (PyObject* value : cast_method(object)->defaults) Py_XDECREF(value);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// __name__, __doc__, __module__, __qualname__ and others.
PyObject* get_attribute_method(PyObject* object, PyObject* name) {
  PyObject* own = PyObject_GenericGetAttr(object, name);
  if (own != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return own;
  PyErr_Clear();
  return PyObject_GetAttr(cast_method(object)->wrapped, name);
}

PyObject* get_documentation_method(PyObject* object, void* /*unused*/) {
  return PyObject_GetAttrString(cast_method(object)->wrapped, "__doc__");
}

// FunctionType, so that isinstance() sees a function with the attributes of the definition.
// TorchDynamo binds functions to their object, but treats other descriptors in C as plain values.
PyObject* get_class_of_definition(PyObject* object, void* /*unused*/) {
  return PyObject_Type(cast_method(object)->wrapped);
}

PyObject* get_module_method(PyObject* object, void* /*unused*/) {
  return PyObject_GetAttrString(cast_method(object)->wrapped, "__module__");
}

PyObject* represent_method(PyObject* object) {
  return guarded([&] {
    const std::string name =
        py::str(py::handle(cast_method(object)->wrapped).attr("__qualname__")).cast<std::string>();
    return py::str("<method '" + name + "' of pycoll communicators>").release().ptr();
  });
}

// Reads the parameters of the definition. Disables the native call if one of them is unknown.
void read_parameters(MethodObject& method, const py::handle& wrapped) {
  const py::object code = wrapped.attr("__code__");
  const auto names = code.attr("co_varnames").cast<py::tuple>();
  const auto positional = code.attr("co_argcount").cast<std::size_t>();
  const std::size_t count = positional + code.attr("co_kwonlyargcount").cast<std::size_t>();
  const py::object given = wrapped.attr("__defaults__");
  const auto values = given.is_none() ? py::tuple() : given.cast<py::tuple>();
  const py::object named = wrapped.attr("__kwdefaults__");
  const auto named_values = named.is_none() ? py::dict() : named.cast<py::dict>();
  method.positional_count = positional - 1;
  method.required = method.positional_count - values.size();
  for (std::size_t one = 0; one + 1 < count; ++one) {
    const auto word = names[one + 1].cast<std::string>();
    const auto* const found = std::find(kParameterNames.begin(), kParameterNames.end(), word);
    if (found == kParameterNames.end()) return method.kind.reset();
    const auto number = static_cast<std::size_t>(found - kParameterNames.begin());
    method.names[method.name_count] = PyUnicode_InternFromString(word.c_str());
    method.parameters[method.name_count++] = static_cast<Parameter>(number);
    if (static_cast<Parameter>(number) == Parameter::kOut && method.required == 1 &&
        method.parameters[0] == Parameter::kX) {
      method.out_name = method.names[one];
    }
    if (one < method.required) continue;
    py::object value = named_values.attr("get")(word);
    if (one < method.positional_count) value = values[one - method.required];
    method.defaults[number] = value.release().ptr();
  }
}

std::optional<CallKind> find_kind(const std::string& name) {
  for (std::size_t one = 0; one < kCallKindCount; ++one) {
    const auto kind = static_cast<CallKind>(one);
    if (name_of(kind) == name) return kind;
  }
  return std::nullopt;
}

py::object make_method(const py::function& function, const py::function& wrapped) {
  PyObject* object = method_type->tp_alloc(method_type, 0);
  if (object == nullptr) throw py::error_already_set();
  auto made = py::reinterpret_steal<py::object>(object);
  MethodObject& method = *cast_method(object);
  method.vectorcall = &call_method;
  method.function = function.inc_ref().ptr();
  method.wrapped = wrapped.inc_ref().ptr();
  new (&method.kind)
      std::optional<CallKind>(find_kind(wrapped.attr("__name__").cast<std::string>()));
  if (method.kind) read_parameters(method, wrapped);
  return made;
}

PyMemberDef method_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(MethodObject, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(MethodObject, wrapped), READONLY, nullptr},
    {"definition", T_OBJECT, offsetof(MethodObject, function), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef method_properties[] = {
    {"__doc__", &get_documentation_method, nullptr, nullptr, nullptr},
    {"__module__", &get_module_method, nullptr, nullptr, nullptr},
    {"__class__", &get_class_of_definition, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

py::object make_world_function(const py::object& function, const py::function& find) {
  if (!Py_IS_TYPE(function.ptr(), method_type)) {
    throw py::type_error("world_function() takes a _core.Method");
  }
  return py::reinterpret_steal<py::object>(bind_to_world(cast_method(function.ptr()), find.ptr()));
}

void bind_methods(py::module_& module) {
  PyType_Slot slots[] = {
      {Py_tp_dealloc, slot(&dealloc_method)}, {Py_tp_traverse, slot(&traverse_method)},
      {Py_tp_clear, slot(&clear_method)},     {Py_tp_call, slot(&PyVectorcall_Call)},
      {Py_tp_descr_get, slot(&get)},          {Py_tp_getattro, slot(&get_attribute_method)},
      {Py_tp_repr, slot(&represent_method)},  {Py_tp_members, method_members},
      {Py_tp_getset, method_properties},      {0, nullptr}};
  PyType_Spec spec = {"pycoll._core.Method", sizeof(MethodObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                          Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_IMMUTABLETYPE |
                          kNotMadeByCalling,
                      slots};
  method_type = add_type(module, "Method", spec);
  module.def("method", &make_method, py::arg("function"), py::arg("wrapped"),
             "A method that tries the native call first, and calls `function` if that declines. It "
             "looks like `wrapped`.");
  module.def(
      "world_function", &make_world_function, py::arg("method"), py::arg("find"),
      "The method of the world's communicator; find() returns that, or raises if none is set.");
}

}  // namespace

void bind_native_calls(py::module_& module) {
  bind_work(module);
  bind_requests(module);
  bind_flat(module);
  bind_calls(module);
  bind_offers(module);
  bind_fused_calls(module);
  bind_methods(module);
  bind_bound_methods(module);
}

}  // namespace pycoll::bindings
