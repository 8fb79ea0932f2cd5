// How Works are created, filled and destroyed.
#include "bindings/core/work_object.h"

#include <array>
#include <atomic>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "bindings/core/gil.h"
#include "bindings/core/raw.h"

namespace pycoll::bindings {
namespace {

// Programs create and drop many Works, so their memory and that of their operations is reused. The
// GIL guards both lists.
constexpr std::size_t kSpareMax = 256;
constexpr std::size_t kSpareWorksMax = 1024;  // a group holds all of its Works until it ends
struct Spare {
  std::array<WorkObject*, kSpareWorksMax> works{};
  std::size_t work_count = 0;
  std::vector<std::shared_ptr<engine::Operation>> operations;
};
Spare& spare() {
  static Spare* const lists = new Spare;  // Works may outlive static objects
  return *lists;
}

PyObject* as_object(WorkObject* work) { return reinterpret_cast<PyObject*>(work); }

// Returns a Work that the garbage collector does not track; watch() tracks it.
WorkObject* allocate(Stage stage) {
  Spare& lists = spare();
  WorkObject* work = nullptr;
  if (lists.work_count != 0) {
    work = lists.works[--lists.work_count];
    (void)PyObject_Init(as_object(work), work_type);
  } else {
    work = as_work(work_type->tp_alloc(work_type, 0));
    if (work == nullptr) throw py::error_already_set();
    PyObject_GC_UnTrack(work);
    new (&work->running) Running();
  }
  work->stage = stage;
  work->ended = 0;
  work->told = false;
  return work;
}

bool may_refer_back(PyObject* object) { return object != nullptr && PyObject_IS_GC(object) != 0; }

// Tracks the Work if it may be part of a cycle. NumPy arrays cannot refer to a
// Work; other objects might.
void watch(WorkObject* work) {
  if (PyObject_GC_IsTracked(as_object(work)) != 0) return;
  if (may_refer_back(work->value) || may_refer_back(work->finish) || may_refer_back(work->kept)) {
    PyObject_GC_Track(work);
  }
}

// Keeps the arrays of a running operation alive after its Work was dropped.
void leave_running(WorkObject* work) noexcept {
  if (work->stage != Stage::kRunning || work->running.operation->done()) return;
  try {
    const auto borrow = [](PyObject* one) {
      return one == nullptr ? py::none() : py::reinterpret_borrow<py::object>(one);
    };
    work->running.communicator->keep(
        work->running.operation, py::make_tuple(borrow(work->kept), borrow(work->value)),
        CommunicatorHandle::Dropped{work->running.name, work->running.user_op});
  } catch (const std::exception&) {
    // No memory for a tuple: the objects are leaked, because the operation still uses them.
    Py_XINCREF(work->kept);
    Py_XINCREF(work->value);
  }
}

// Reports a failure that wait() can no longer raise.
void report_failure(const WorkObject* work) noexcept {
  if (work->stage != Stage::kRunning || work->told || !work->running.operation->done()) return;
  const Status& status = work->running.operation->status();
  if (status.ok()) return;
  work->running.communicator->report(status, {work->running.name, work->running.user_op});
}

void expect_result(WorkObject* work, py::object result, py::object finish, py::object kept) {
  work->value = result.release().ptr();
  work->kept = kept.release().ptr();
  if (finish && !finish.is_none()) {
    work->finish = finish.release().ptr();
    work->finishing = new std::mutex();
  }
}

// Ends the wait; inputs need not be kept any longer.
void end(PyObject* object, Stage stage, PyObject* value) {
  WorkObject* work = as_work(object);
  work->stage = stage;
  Py_XSETREF(work->value, Py_NewRef(value));
  watch(work);
  Py_CLEAR(work->finish);
  Py_CLEAR(work->kept);
}

}  // namespace

int traverse_work(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(as_work(object)->value);
  Py_VISIT(as_work(object)->kept);
  Py_VISIT(as_work(object)->finish);
  return 0;
}

int clear_work(PyObject* object) {
  leave_running(as_work(object));
  Py_CLEAR(as_work(object)->value);
  Py_CLEAR(as_work(object)->kept);
  Py_CLEAR(as_work(object)->finish);
  return 0;
}

void let_go(Running& running) {
  std::shared_ptr<engine::Operation> operation = std::move(running.operation);
  const bool reusable = running.reusable;
  running = Running();
  if (reusable) reuse(std::move(operation));
}

void dealloc_work(PyObject* object) {
  PyObject_GC_UnTrack(object);
  WorkObject* work = as_work(object);
  report_failure(work);
  (void)clear_work(object);
  delete std::exchange(work->finishing, nullptr);
  if (work->running.communicator != nullptr) let_go(work->running);
  PyTypeObject* type = Py_TYPE(object);
  Spare& lists = spare();
  if (lists.work_count < kSpareWorksMax) {
    lists.works[lists.work_count++] = work;
  } else {
    work->running.~Running();
    type->tp_free(object);
  }
  Py_DECREF(type);
}

py::object make_work(Running running, py::object result, py::object finish, py::object kept) {
  WorkObject* work = allocate(Stage::kRunning);
  auto made = py::reinterpret_steal<py::object>(as_object(work));
  work->running = std::move(running);
  expect_result(work, std::move(result), std::move(finish), std::move(kept));
  watch(work);
  return made;
}

std::shared_ptr<engine::Operation> new_operation() {
  auto& operations = spare().operations;
  if (operations.empty()) return std::make_shared<engine::Operation>();
  auto operation = std::move(operations.back());
  operations.pop_back();
  return operation;
}

void reuse(std::shared_ptr<engine::Operation> operation) {
  auto& operations = spare().operations;
  if (operation.use_count() != 1 || operations.size() >= kSpareMax) return;
  std::atomic_thread_fence(std::memory_order_acquire);  // after the last owner has dropped it
  operation->reset();
  operations.push_back(std::move(operation));
}

// Not tracked before it is filled: until then its group owns it, and the garbage collector does not
// see that reference.
PyObject* make_open_work(py::object result, py::object finish, py::object kept) {
  WorkObject* work = allocate(Stage::kOpen);
  expect_result(work, std::move(result), std::move(finish), std::move(kept));
  return as_object(work);
}

PyObject* take_over_work(PyObject* object, PyObject* array) {
  WorkObject* work = as_work(object);
  if (Py_REFCNT(object) != 1 || work->stage != Stage::kOpen || work->kept != nullptr ||
      work->finish != nullptr) {
    return nullptr;
  }
  return std::exchange(work->value, Py_NewRef(array));
}

void fill_work(PyObject* object, PyObject* result) { end(object, Stage::kGiven, result); }

void fill_work(PyObject* object) {
  const WorkObject* work = as_work(object);
  if (work->finish == nullptr) return fill_work(object, work->value);
  const auto result =
      py::reinterpret_steal<py::object>(call_python(work->finish, nullptr, 0, nullptr));
  if (!result) throw py::error_already_set();
  fill_work(object, result.ptr());
}

void fill_and_drop_work(PyObject* object) {
  // If the caller has the only reference, as in most programs, the result is not needed.
  if (Py_REFCNT(object) > 1 || as_work(object)->finish != nullptr) fill_work(object);
  Py_DECREF(object);
}

void fail_work(PyObject* object, PyObject* error) { end(object, Stage::kFailed, error); }

}  // namespace pycoll::bindings
