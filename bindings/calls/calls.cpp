#include "bindings/calls/calls.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "bindings/core/raw.h"

namespace pycoll::bindings {
namespace {

// Whether any peer can access memory of this process in place.
bool is_reached(const engine::Communicator& communicator) {
  const auto& media = communicator.media();
  return std::any_of(media.begin(), media.end(),
                     [](std::string_view one) { return one == "shm" || one == "verbs"; });
}

}  // namespace

OperationHandle operation_of(const RequestHandle& request, std::uint64_t input_bytes,
                             std::uint64_t output_bytes) {
  auto operation = std::make_shared<Operation>();
  operation->request = request.request;
  operation->request.input.bytes = input_bytes;
  operation->request.output.bytes = output_bytes;
  return operation;
}

CallState::CallState(SharedHandle shared)
    : handle(std::move(shared)), memory(is_reached(*handle->native)) {}

std::unique_ptr<Fusions> CallState::take_fusions() {
  return spare_ != nullptr ? std::move(spare_) : std::make_unique<Fusions>();
}

void CallState::give_back(std::unique_ptr<Fusions> fusions) { spare_ = std::move(fusions); }

namespace {

PyTypeObject* calls_type = nullptr;

CallsObject* cast_calls(PyObject* object) { return reinterpret_cast<CallsObject*>(object); }

// Created by object's own tp_new, which in Python 3.11 keeps the attributes inside the
// object. Only then does the interpreter cache the lookup of `comm.all_reduce`. Access to the
// object's __dict__ ends that.
PyObject* make_calls(PyTypeObject* type, PyObject* /*arguments*/, PyObject* /*names*/) {
  const auto nothing = py::reinterpret_steal<py::object>(PyTuple_New(0));
  if (!nothing) return nullptr;
  PyObject* object = PyBaseObject_Type.tp_new(type, nothing.ptr(), nullptr);
  if (object != nullptr) cast_calls(object)->group = Py_NewRef(Py_None);
  return object;
}

int traverse_calls(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(cast_calls(object)->native);
  Py_VISIT(cast_calls(object)->group);
  return 0;
}

int clear_calls(PyObject* object) {
  delete std::exchange(cast_calls(object)->state, nullptr);
  Py_CLEAR(cast_calls(object)->native);
  Py_CLEAR(cast_calls(object)->group);
  return 0;
}

void dealloc_calls(PyObject* object) {
  PyObject_GC_UnTrack(object);
  (void)clear_calls(object);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* get_native(PyObject* object, void* /*unused*/) {
  PyObject* native = cast_calls(object)->native;
  if (native == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "_native");
    return nullptr;
  }
  return Py_NewRef(native);
}

int set_native(PyObject* object, PyObject* value, void* /*unused*/) {
  PyObject* done = guarded([&] {
    if (value == nullptr) throw py::type_error("_native cannot be deleted");
    auto shared = py::handle(value).cast<SharedHandle>();
    if (shared == nullptr) throw py::type_error("_native must be a _core.Communicator");
    delete std::exchange(cast_calls(object)->state, new CallState(std::move(shared)));
    Py_XSETREF(cast_calls(object)->native, Py_NewRef(value));
    return Py_None;
  });
  return done == nullptr ? -1 : 0;
}

PyObject* get_group(PyObject* object, void* /*unused*/) {
  return Py_NewRef(cast_calls(object)->group);
}

PyGetSetDef calls_members[] = {
    {"_native", &get_native, &set_native, "The engine.", nullptr},
    {"_group", &get_group, nullptr, "The group in progress, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

CallsObject* as_calls(PyObject* object) {
  // Most programs have one class of communicators. Classes are never freed, so no other class gets
  // the address of `last`.
  static PyTypeObject* last = nullptr;
  if (Py_TYPE(object) == last) return cast_calls(object);
  if (PyObject_TypeCheck(object, calls_type) == 0) return nullptr;
  Py_XSETREF(last, reinterpret_cast<PyTypeObject*>(Py_NewRef(Py_TYPE(object))));
  return cast_calls(object);
}

CallsObject& need_calls(const py::object& object) {
  CallsObject* calls = as_calls(object.ptr());
  if (calls == nullptr || calls->state == nullptr) throw py::type_error("expected a communicator");
  return *calls;
}

void bind_calls(py::module_& module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(&make_calls)},
                         {Py_tp_dealloc, slot(&dealloc_calls)},
                         {Py_tp_traverse, slot(&traverse_calls)},
                         {Py_tp_clear, slot(&clear_calls)},
                         {Py_tp_getset, calls_members},
                         {Py_tp_doc, text("State of a communicator's native calls.")},
                         {0, nullptr}};
  PyType_Spec spec = {"pycoll._core.Calls", sizeof(CallsObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  calls_type = add_type(module, "Calls", spec);
  module.def(
      "forget", [](const py::object& calls) { need_calls(calls).state->cache.forget(); },
      py::arg("calls"), "Drop all that is known of calls; later calls go to Python first.");
}

}  // namespace pycoll::bindings
