#include "bindings/core/work.h"

#include <mutex>
#include <optional>
#include <utility>

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {
namespace {

PyObject* done(PyObject* object, PyObject* /*unused*/) {
  const WorkObject* work = as_work(object);
  return PyBool_FromLong(work->stage == Stage::kRunning ? work->running.operation->done()
                                                        : work->stage != Stage::kOpen);
}

// nullopt: no limit. Throws as pycoll.types.check_timeout does.
std::optional<double> read_timeout(PyObject* timeout) {
  if (timeout == nullptr || timeout == Py_None) return std::nullopt;
  if (PyFloat_CheckExact(timeout) && PyFloat_AS_DOUBLE(timeout) > 0) {
    return PyFloat_AS_DOUBLE(timeout);
  }
  const py::object check = py::module_::import("pycoll.types").attr("check_timeout");
  return call_python(check, py::handle(timeout)).cast<double>();
}

// Completes a Work whose operation has ended well; its inputs need not be kept any longer.
void complete(WorkObject* work) {
  if (work->running.user_op != nullptr) return;
  work->stage = Stage::kGiven;
  work->ended = work->running.operation->ended();
  let_go(work->running);
  Py_CLEAR(work->kept);
}

// Returns when the operation has ended well; throws otherwise.
void await(const Running& running, const std::optional<double>& limit) {
  refuse_inside_reduction("wait");
  CommunicatorHandle& communicator = *running.communicator;
  const engine::Operation& operation = *running.operation;
  if (!operation.done() && communicator.alone)
    communicator.native->brief().try_drive(operation, kSpin);
  Status status;
  if (operation.done()) {
    status = operation.status();
  } else {
    const ReleasedGil release;
    status = communicator.native->drive(operation, limit ? nanoseconds(*limit) : kForever,
                                        signal_raised);
  }
  communicator.drop_done();
  if (operation.done()) communicator.note_told(operation.status());
  if (running.user_op != nullptr) running.user_op->rethrow();
  if (!status.ok() || PyErr_Occurred() != nullptr) {
    raise_if_failed(status, running.name, communicator.native->names());
  }
}

// The result of the blocking call. Requires: the operation is done.
PyObject* result_of(WorkObject* work) {
  if (work->finishing == nullptr) return Py_NewRef(work->value);
  std::unique_lock<std::mutex> lock(*work->finishing, std::defer_lock);
  {
    const ReleasedGil release;
    lock.lock();
  }
  if (work->finish != nullptr) {
    PyObject* result = call_python(work->finish, nullptr, 0, nullptr);
    if (result == nullptr) throw py::error_already_set();
    Py_XSETREF(work->value, result);
    Py_CLEAR(work->finish);
  }
  return Py_NewRef(work->value);
}

PyObject* wait(WorkObject* work, PyObject* timeout) {
  const std::optional<double> limit = read_timeout(timeout);
  switch (work->stage) {
    case Stage::kOpen:
      raise_if_failed(Status::error(Code::kInvalidArgument,
                                    "wait() inside the group: its operations start when the with "
                                    "block ends"),
                      "wait");
      break;
    case Stage::kFailed:
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(work->value)), work->value);
      return nullptr;
    case Stage::kRunning: {
      // Another thread that waits for the same Work may complete it meanwhile.
      const Running running = work->running;
      try {
        await(running, limit);
      } catch (const py::error_already_set&) {
        work->told = running.operation->done();
        throw;
      }
      if (work->stage == Stage::kRunning) complete(work);
      break;
    }
    case Stage::kGiven:
      break;
  }
  return result_of(work);
}

// A new reference to the result if it is available at once; nullptr otherwise.
PyObject* result_at_once(WorkObject* work) {
  if (work->finishing != nullptr) return nullptr;
  if (work->stage == Stage::kGiven) return Py_NewRef(work->value);
  if (work->stage != Stage::kRunning || !work->running.operation->done() ||
      !work->running.operation->status().ok() || work->running.user_op != nullptr ||
      UserOp::running()) {
    return nullptr;
  }
  complete(work);
  return Py_NewRef(work->value);
}

PyObject* wait_entry(PyObject* object, PyObject* const* arguments, Py_ssize_t count,
                     PyObject* names) {
  if (count == 0 && names == nullptr) {
    PyObject* result = result_at_once(as_work(object));
    if (result != nullptr) return result;
  }
  PyObject* timeout = count > 0 ? arguments[0] : nullptr;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (named == 1 && count == 0 &&
      PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout") == 0) {
    timeout = arguments[0];
  } else if (named != 0 || count > 1) {
    PyErr_SetString(PyExc_TypeError, "wait() takes one argument, timeout");
    return nullptr;
  }
  return guarded([&] { return wait(as_work(object), timeout); });
}

// The time of the end in seconds of time.perf_counter(), or None.
PyObject* ended_s(PyObject* object, PyObject* /*unused*/) {
  const WorkObject* work = as_work(object);
  Nanoseconds ended = work->ended;
  if (work->stage == Stage::kRunning && work->running.operation->done()) {
    ended = work->running.operation->ended();
  }
  if (ended == 0) Py_RETURN_NONE;
  return PyFloat_FromDouble(static_cast<double>(ended) * 1e-9);
}

PyObject* represent(PyObject* object) {
  const WorkObject* work = as_work(object);
  if (work->stage == Stage::kOpen) return PyUnicode_FromString("<Work of a group, not started>");
  if (work->stage == Stage::kGiven) return PyUnicode_FromString("<Work, done>");
  if (work->stage == Stage::kFailed) return PyUnicode_FromString("<Work, failed>");
  const std::string name(work->running.name);
  return PyUnicode_FromFormat("<Work of %s, %s>", name.c_str(),
                              work->running.operation->done() ? "done" : "running");
}

PyMethodDef work_methods[] = {
    {"ended_s", &ended_s, METH_NOARGS,
     "ended_s($self, /)\n--\n\n"
     "Return the time at which the operation ended, in seconds of time.perf_counter().\n\n"
     "Returns None unless the operation has ended while a timeline was recorded.\n\n"
     "Errors and cost: none.\n\n"
     ">>> comm.barrier(async_op=True).ended_s() is None\n"
     "True"},
    {"done", &done, METH_NOARGS,
     "done($self, /)\n--\n\n"
     "Return whether ``wait`` would return or raise at once.\n\n"
     "Errors and cost: none.\n\n"
     ">>> work = comm.barrier(async_op=True)\n"
     ">>> work.wait(), work.done()\n"
     "(None, True)"},
    {"wait", as_c_function(&wait_entry), METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\n"
     "Block until the operation is done.\n\n"
     "``timeout``: limit in seconds; None waits until the operation's own deadline, which is the\n"
     "communicator's ``timeout_s``.\n\n"
     "Returns the result of the blocking call.\n\n"
     "Raises the operation's error. Raises TimeoutError if the operation is still running after\n"
     "``timeout``; it continues, and wait() may be called again. Raises InvalidArgumentError\n"
     "inside a group, because its operations have not started yet.\n\n"
     "Cost: none beyond the wait.\n\n"
     ">>> comm.all_reduce(1.5, async_op=True).wait()\n"
     "1.5"},
    {"__class_getitem__", &Py_GenericAlias, METH_O | METH_CLASS,
     "Work[T], for annotations: T is the type of the result of wait()."},
    {nullptr, nullptr, 0, nullptr}};

constexpr const char* kDocumentation =
    "An operation started with ``async_op=True``, by isend or irecv, or inside a group.\n\n"
    "Leave the arrays that it reads or writes alone until it is done; pycoll keeps them alive.\n"
    "The operation runs even if no thread waits for it. If it fails and its Work was dropped,\n"
    "sys.unraisablehook gets the error once, and the next call on the communicator raises it,\n"
    "unless a call or another wait has raised the same failure. Threads: any.\n\n"
    "Errors: ``wait`` raises those of the operation. Cost: none.\n\n"
    ">>> comm = pycoll.init(rank=0, size=1)\n"
    ">>> work = comm.all_reduce(1.5, async_op=True)\n"
    ">>> work.wait(), work.done()\n"
    "(1.5, True)";

}  // namespace

void bind_work(py::module_& module) {
  PyType_Slot slots[] = {{Py_tp_dealloc, slot(&dealloc_work)},
                         {Py_tp_traverse, slot(&traverse_work)},
                         {Py_tp_clear, slot(&clear_work)},
                         {Py_tp_repr, slot(&represent)},
                         {Py_tp_methods, work_methods},
                         {Py_tp_doc, text(kDocumentation)},
                         {0, nullptr}};
  PyType_Spec spec = {"pycoll.Work", sizeof(WorkObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | kNotMadeByCalling, slots};
  work_type = add_type(module, "Work", spec);
  module.def(
      "fill_work",
      [](const py::object& work, const py::object& result) { fill_work(work.ptr(), result.ptr()); },
      py::arg("work"), py::arg("result"), "Complete the Work of a group with its result.");
  module.def(
      "fail_work",
      [](const py::object& work, const py::object& error) { fail_work(work.ptr(), error.ptr()); },
      py::arg("work"), py::arg("error"), "End the Work of a group with an error.");
  module.def("record_ends", &engine::Operation::record_ends, py::arg("record"),
             "Set whether Works record the time at which they end, from now on in this process.");
}

}  // namespace pycoll::bindings
