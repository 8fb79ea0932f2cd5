// The with block of a group. If it contains only all_reduces that native code has read, it is
// entered and left without Python code.
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/arrays/buffer_view.h"
#include "bindings/calls/fused_calls.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"
#include "bindings/core/work_object.h"

namespace pycoll::bindings {
namespace {

// _core.Group, the base of pycoll.comm.groups.Group.
struct GroupObject {
  PyObject head;
  PyObject* communicator;
  Fusions* fusions;
  bool entered;  // it is the communicator's current group
};

PyTypeObject* group_type = nullptr;

GroupObject* cast_group(PyObject* object) { return reinterpret_cast<GroupObject*>(object); }

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

int traverse_group(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(cast_group(object)->communicator);
  return 0;
}

int clear_group(PyObject* object) {
  Py_CLEAR(cast_group(object)->communicator);
  return 0;
}

void dealloc_group(PyObject* object) {
  PyObject_GC_UnTrack(object);
  std::unique_ptr<Fusions> fusions(std::exchange(cast_group(object)->fusions, nullptr));
  CallsObject* calls = cast_group(object)->communicator == nullptr ? nullptr : calls_of(object);
  if (calls != nullptr && calls->state != nullptr) {
    fusions->clear();
    calls->state->give_back(std::move(fusions));
  }
  fusions.reset();
  (void)clear_group(object);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
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

// The fusions of a _core.Group. Throws TypeError for any other object.
Fusions& fusions_of(const py::object& group) {
  if (PyObject_TypeCheck(group.ptr(), group_type) == 0) throw py::type_error("expected a group");
  return *cast_group(group.ptr())->fusions;
}

// Adds a member that Python has read.
void add(const py::object& group, const py::object& work, const py::object& message,
         const BufferView& source, const BufferView& target) {
  (void)fusions_of(group).add(
      message.ptr(), work.ptr(), source.data, target.data, source.bytes(),
      transport::shape_key(static_cast<int>(source.shape.size()), source.shape.data()), true);
  work.inc_ref();
}

void bind_fusions(py::module_& module) {
  module.attr("FUSED_BYTES_MAX") = kMemberBytesMax;
  module.attr("MESSAGE_BYTES_MAX") = kMessageBytesMax;
  module.def(
      "open_work",
      [](py::object finish, py::object kept) {
        return py::reinterpret_steal<py::object>(
            make_open_work({}, std::move(finish), std::move(kept)));
      },
      py::arg("finish") = py::none(), py::arg("kept") = py::none(),
      "A Work of a group that has not ended; finish() will return its result.");
  module.def("fuse", &add, py::arg("group"), py::arg("work"), py::arg("message"), py::arg("source"),
             py::arg("target"),
             "Add an all_reduce; calls with the same object `message` may share messages.");
  module.def(
      "note_array",
      [](const py::object& group, int dtype, int op, const std::vector<std::int64_t>& shape) {
        fusions_of(group).arrays().add(static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                       static_cast<int>(shape.size()), shape.data());
      },
      py::arg("group"), py::arg("dtype"), py::arg("op"), py::arg("shape"),
      "Name an array of the group that Python has read in error texts.");
  module.def(
      "arrays_of",
      [](const py::object& group) {
        return std::make_shared<executor::CallArrays>(fusions_of(group).arrays());
      },
      py::arg("group"), "A copy of the arrays that the group has so far.");
  module.def(
      "arrays_key",
      [](const std::vector<std::pair<std::uint64_t, std::vector<std::int64_t>>>& arrays) {
        ArraysKey key;
        for (const auto& [nbytes, shape] : arrays) {
          key.add(nbytes, transport::shape_key(static_cast<int>(shape.size()), shape.data()));
        }
        return key.value();
      },
      py::arg("arrays"),
      "Part of a message's key, to be combined by exclusive or; arrays: pairs of bytes and shape.");
  module.def(
      "run_fusion",
      [](const py::object& group, const py::object& communicator, std::size_t number) {
        run_fusion(&need_calls(communicator), fusions_of(group), number);
      },
      py::arg("group"), py::arg("communicator"), py::arg("number"),
      "Run one fusion, compiled if necessary, and fill its Works.");
}

}  // namespace

void bind_groups(py::module_& module) {
  bind_fusions(module);
  PyType_Slot slots[] = {{Py_tp_new, slot(&make_group)},
                         {Py_tp_dealloc, slot(&dealloc_group)},
                         {Py_tp_traverse, slot(&traverse_group)},
                         {Py_tp_clear, slot(&clear_group)},
                         {Py_tp_methods, group_methods},
                         {Py_tp_members, group_members},
                         {Py_tp_doc, text("The calls inside one group, in order.")},
                         {0, nullptr}};
  PyType_Spec spec = {"pycoll._core.Group", sizeof(GroupObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  group_type = add_type(module, "Group", spec);
}

}  // namespace pycoll::bindings
