// The with block of a group. If it contains only all_reduces that native code has read, it is
// entered and left without Python code.
#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings/calls/fusions.h"
#include "bindings/core/bind.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {
namespace {

// _core.Group, the base of pycoll.comm.groups.Group.
struct GroupObject {
  PyObject head;
  PyObject* communicator;
  Fusions* fusions;
  bool entered;  // it is the communicator's current group
};

using GroupType = CollectedType<GroupObject, &GroupObject::communicator>;

PyTypeObject* group_type = nullptr;

GroupObject* cast_group(PyObject* object) { return &GroupType::of(object); }

CallsObject* calls_of(PyObject* object) { return as_calls(cast_group(object)->communicator); }

PyObject* make_group(PyTypeObject* type, PyObject* arguments, PyObject* /*names*/) {
  if (PyTuple_GET_SIZE(arguments) != 1 || as_calls(PyTuple_GET_ITEM(arguments, 0)) == nullptr) {
    PyErr_SetString(PyExc_TypeError, "a group is of one communicator");
    return nullptr;
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  cast_group(object)->communicator = Py_NewRef(PyTuple_GET_ITEM(arguments, 0));
  CallState* state = calls_of(object)->state;
  cast_group(object)->fusions = state == nullptr ? new Fusions() : state->take_fusions().release();
  return object;
}

// The fusions stay when the collector clears the group, because Python may use it then.
void dealloc_group(PyObject* object) {
  PyObject_GC_UnTrack(object);
  std::unique_ptr<Fusions> fusions(std::exchange(cast_group(object)->fusions, nullptr));
  CallsObject* calls = cast_group(object)->communicator == nullptr ? nullptr : calls_of(object);
  if (calls != nullptr && calls->state != nullptr) {
    fusions->clear();
    calls->state->give_back(std::move(fusions));
  }
  fusions.reset();
  GroupType::dealloc(object);
}

PyObject* enter(PyObject* object, PyObject* /*unused*/) {
  CallsObject* calls = calls_of(object);
  if (calls->group != Py_None) return Py_NewRef(calls->group);
  Py_XSETREF(calls->group, Py_NewRef(object));
  calls->fusions = cast_group(object)->fusions;
  cast_group(object)->entered = true;
  return Py_NewRef(object);
}

void run_members(PyObject* object) {
  Fusions& fusions = *cast_group(object)->fusions;
  const py::handle self(object);
  if (fusions.has_others()) {
    (void)call_python(self.attr("run"));
    return;
  }
  CallsObject* calls = calls_of(object);
  if (fusions.size() != 0 && calls->state == nullptr) throw py::type_error("no communicator");
  for (std::size_t number = 0; number < fusions.size(); ++number) {
    run_fusion(calls, fusions, number);
  }
}

// Gives the pending error to members without a result. The error stays set.
void tell_members(const py::object& group) {
  py::error_already_set error;
  const py::object told = py::reinterpret_steal<py::object>(
      guarded([&] { return call_python(group.attr("abandon"), error.value()).release().ptr(); }));
  if (!told) PyErr_WriteUnraisable(group.ptr());
  error.restore();
}

PyObject* leave(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "__exit__() takes 3 arguments: type, value and traceback");
    return nullptr;
  }
  if (!cast_group(object)->entered) Py_RETURN_NONE;
  CallsObject* calls = calls_of(object);
  // The communicator's reference may be the last one.
  const auto held = py::reinterpret_borrow<py::object>(object);
  cast_group(object)->entered = false;
  calls->fusions = nullptr;
  Py_SETREF(calls->group, Py_NewRef(Py_None));
  PyObject* left = guarded([&]() -> PyObject* {
    if (arguments[1] != Py_None || arguments[0] != Py_None) {
      (void)call_python(held.attr("leave"));
      return Py_NewRef(Py_None);
    }
    run_members(object);
    if (!cast_group(object)->fusions->have_run()) {
      throw std::runtime_error("an all_reduce of the group did not run: a fault of pycoll");
    }
    return Py_NewRef(Py_None);
  });
  if (left == nullptr) tell_members(held);
  cast_group(object)->fusions->clear();
  return left;
}

PyObject* add_other(PyObject* object, PyObject* other) {
  cast_group(object)->fusions->add_other(py::reinterpret_borrow<py::object>(other));
  Py_RETURN_NONE;
}

PyObject* entries(PyObject* object, PyObject* /*unused*/) {
  return guarded([&] { return cast_group(object)->fusions->entries().release().ptr(); });
}

PyObject* abandon_fusions(PyObject* object, PyObject* error) {
  return guarded([&] {
    cast_group(object)->fusions->abandon(error);
    return Py_NewRef(Py_None);
  });
}

PyMethodDef group_methods[] = {
    {"__enter__", &enter, METH_NOARGS, "The communicator's group: this one, or the outer one."},
    {"__exit__", as_c_function(&leave), METH_FASTCALL, "Run everything, unless the block raised."},
    {"add_other", &add_other, METH_O, "Add another operation, to run after all entries so far."},
    {"entries", &entries, METH_NOARGS, "Numbers of fusions and the other operations, in order."},
    {"abandon_fusions", &abandon_fusions, METH_O, "Give the error to members without a result."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef group_members[] = {
    {"communicator", T_OBJECT, offsetof(GroupObject, communicator), READONLY, "Its communicator."},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

Fusions& fusions_of(const py::object& group) {
  if (PyObject_TypeCheck(group.ptr(), group_type) == 0) throw py::type_error("expected a group");
  return *cast_group(group.ptr())->fusions;
}

void bind_groups(py::module_& module) {
  group_type = GroupType::make(module, "pycoll._core.Group", Py_TPFLAGS_BASETYPE,
                               {{Py_tp_new, slot(&make_group)},
                                {Py_tp_methods, group_methods},
                                {Py_tp_members, group_members},
                                {Py_tp_doc, text("The calls inside one group, in order.")}},
                               &dealloc_group);
}

}  // namespace pycoll::bindings
