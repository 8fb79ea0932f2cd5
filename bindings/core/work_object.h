// The object behind pycoll.Work, the Python handle of an operation that may still run: how it is
// created, filled and destroyed. It uses CPython's own interface, because every non-blocking call
// creates one. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <string_view>

#include "bindings/core/handle.h"
#include "bindings/core/user_op.h"

namespace pycoll::bindings {

// The operation for which a Work waits. `name` has static storage duration.
struct Running {
  SharedHandle communicator;
  std::shared_ptr<engine::Operation> operation;
  std::shared_ptr<UserOp> user_op;
  std::string_view name;
  bool reusable = false;  // from new_operation(): the engine drops the operation at its end
};

// Creates a Work for a started operation. Its wait() returns `result`, or the result of `finish()`
// if that is not None. `kept` and the result stay alive until the operation is done, even if the
// Work is dropped. Returns a new reference; throws without memory.
pybind11::object make_work(Running running, pybind11::object result, pybind11::object finish,
                           pybind11::object kept = {});

// An operation that is not done, for make_work(), which recycles used ones.
std::shared_ptr<engine::Operation> new_operation();
// Drops an operation. new_operation() may return it later if nothing else refers to it.
void reuse(std::shared_ptr<engine::Operation> operation);

// Creates a Work of a group that has not ended. Its wait() will return `result`, or the
// result of `finish()` if that is not null; `kept` stays alive until then. Returns a new
// reference; throws without memory.
[[nodiscard]] PyObject* make_open_work(pybind11::object result = {}, pybind11::object finish = {},
                                       pybind11::object kept = {});
// Reuses the Work of make_open_work(array) for another array, and returns the reference to its
// former array. nullptr, with nothing done, if the caller is not its only owner, or if the Work is
// of another kind.
[[nodiscard]] PyObject* take_over_work(PyObject* object, PyObject* array);
// Completes the Work when the group has ended. Without `result`, its result is that given to
// make_open_work(). Throws the exception of finish(); the Work then stays open.
void fill_work(PyObject* object, PyObject* result);
void fill_work(PyObject* object);
// Completes the Work as fill_work(object) does, then drops the caller's reference unless it throws.
void fill_and_drop_work(PyObject* object);
void fail_work(PyObject* object, PyObject* error);

// Memory layout, for the type (work.cpp).
enum class Stage : std::uint8_t {
  kOpen,     // a member of a group that has not ended
  kRunning,  // `running` describes the operation
  kGiven,    // `value` is the result
  kFailed,   // `value` is the exception
};

struct WorkObject {
  PyObject head;
  Running running;
  PyObject* value;   // the result, which the operation may still fill; or an exception, or nullptr
  PyObject* kept;    // inputs of the operation, or nullptr
  PyObject* finish;  // computes the result at the end; nullptr: `value` is the result
  std::mutex* finishing;  // with `finish`: several threads may wait, and it runs once
  Nanoseconds ended;      // end of the operation, after let_go(); 0 if unknown
  Stage stage;
  bool told;  // wait() has raised the operation's failure
};

inline PyTypeObject* work_type = nullptr;

inline WorkObject* as_work(PyObject* object) { return reinterpret_cast<WorkObject*>(object); }

// Takes the ended operation out of `running`. If nothing else refers to it, it is reset for reuse.
void let_go(Running& running);

// Slots of the type.
int traverse_work(PyObject* object, visitproc visit, void* arg);
int clear_work(PyObject* object);
void dealloc_work(PyObject* object);

}  // namespace pycoll::bindings
