#include "bindings/calls/method.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bindings/calls/fusions.h"
#include "bindings/core/bind.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"
#include "bindings/core/work.h"

namespace pycoll::bindings {
namespace {

using MethodType = CollectedType<MethodObject, &MethodObject::function, &MethodObject::wrapped>;

PyTypeObject* method_type = nullptr;

MethodObject* cast_method(PyObject* object) { return &MethodType::of(object); }

// Whether the arguments without self are (x, out=x), with default values otherwise: the most common
// call.
bool is_in_place(const MethodObject& method, PyObject* const* arguments, std::size_t given,
                 PyObject* names) {
  return given == 1 && names != nullptr && PyTuple_GET_SIZE(names) == 1 &&
         PyTuple_GET_ITEM(names, 0) == method.out_name && arguments[1] == arguments[0];
}

// Communicator.name(self, ...). arguments[0] is self already, so the call does not change it.
PyObject* call_unbound(PyObject* object, PyObject* const* arguments, std::size_t count,
                       PyObject* names) {
  const MethodObject& method = *cast_method(object);
  const auto given = static_cast<std::size_t>(PyVectorcall_NARGS(count));
  if (given == 0) return call_python(method.function, arguments, count, names);
  return call_method(method, arguments[0], arguments + 1,
                     (given - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

PyObject* get(PyObject* object, PyObject* self, PyObject* /*type*/) {
  if (self == nullptr) return Py_NewRef(object);
  return bind_method(cast_method(object), self);
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
  method.vectorcall = &call_unbound;
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

}  // namespace

void MethodObject::forget() {
  for (PyObject*& name : names) Py_CLEAR(name);
  for (PyObject*& value : defaults) Py_CLEAR(value);
}

MethodObject* as_method(PyObject* object) {
  return Py_IS_TYPE(object, method_type) ? cast_method(object) : nullptr;
}

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

PyObject* call_method(const MethodObject& method, PyObject* self, PyObject* const* arguments,
                      std::size_t count, PyObject* names) {
  CallsObject* calls = as_calls(self);
  if (calls == nullptr || !method.kind) {
    return call_definition(method, self, arguments, count, names);
  }
  const auto given = static_cast<std::size_t>(PyVectorcall_NARGS(count));
  if (is_in_place(method, arguments, given, names)) {
    const std::optional<PyObject*> result =
        repeat_in_place(calls, *method.kind, method.defaults.data(), arguments[0]);
    if (result) return *result;
  }
  Arguments sorted;
  if (!sort_arguments(method, arguments, given, names, &sorted)) {
    return call_definition(method, self, arguments, count, names);
  }
  return call_sorted(method, self, arguments, count, names, sorted, nullptr);
}

PyObject* call_sorted(const MethodObject& method, PyObject* self, PyObject* const* arguments,
                      std::size_t count, PyObject* names, const Arguments& sorted,
                      CompiledCallHandle* hint) {
  CallsObject* calls = as_calls(self);
  const std::optional<PyObject*> result = call_natively(calls, *method.kind, sorted, hint);
  if (result) return *result;
  return run_definition({calls, *method.kind, sorted},
                        [&] { return call_definition(method, self, arguments, count, names); });
}

PyObject* call_definition(const MethodObject& method, PyObject* self, PyObject* const* arguments,
                          std::size_t count, PyObject* names) {
  const auto given = static_cast<std::size_t>(PyVectorcall_NARGS(count));
  if ((count & PY_VECTORCALL_ARGUMENTS_OFFSET) != 0) {
    PyObject** all = const_cast<PyObject**>(arguments) - 1;
    PyObject* before = std::exchange(all[0], self);
    PyObject* result = call_python(method.function, all, given + 1, names);
    all[0] = before;
    return result;
  }
  const std::size_t named =
      names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(names));
  std::vector<PyObject*> all{self};
  all.insert(all.end(), arguments, arguments + given + named);
  return call_python(method.function, all.data(), given + 1, names);
}

void bind_methods(py::module_& module) {
  method_type = MethodType::make(module, "pycoll._core.Method",
                                 Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                                     Py_TPFLAGS_IMMUTABLETYPE | kNotMadeByCalling,
                                 {{Py_tp_call, slot(&PyVectorcall_Call)},
                                  {Py_tp_descr_get, slot(&get)},
                                  {Py_tp_getattro, slot(&get_attribute_method)},
                                  {Py_tp_repr, slot(&represent_method)},
                                  {Py_tp_members, method_members},
                                  {Py_tp_getset, method_properties}});
  module.def("method", &make_method, py::arg("function"), py::arg("wrapped"),
             "A method that tries the native call first, and calls `function` if that declines. It "
             "looks like `wrapped`.");
}

void bind_native_calls(py::module_& module) {
  bind_work(module);
  bind_requests(module);
  bind_flat(module);
  bind_calls(module);
  bind_fusions(module);
  bind_lists(module);
  bind_groups(module);
  bind_methods(module);
  bind_bound_methods(module);
}

}  // namespace pycoll::bindings
