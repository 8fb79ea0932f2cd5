// pycoll.Work: the handle of an operation that may still run, in Python. Written with CPython's own
// interface, since one is made for every non-blocking call. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string_view>

#include "bindings/handle.h"
#include "bindings/user_op.h"

namespace pycoll::bindings {

// What a Work waits for. `name` has static storage duration.
struct Running {
  SharedHandle communicator;
  std::shared_ptr<runtime::Operation> operation;
  std::shared_ptr<UserOp> user_op;
  std::string_view name;
  bool reusable = false;  // the operation is of new_operation(), so that the engine forgets it
};

// A Work for a started operation. Its wait() gives `result`, or what `finish()` gives if that is
// not None. `kept` and the result stay alive until the operation is done, whether or not anybody
// holds the Work. A new reference; throws when there is no memory.
pybind11::object make_work(Running running, pybind11::object result, pybind11::object finish,
                           pybind11::object kept = {});

// An operation that is not done; for make_work(), which is where used ones come back from. Not for
// messages, whose deadlines the engine knows for a while after their end.
std::shared_ptr<runtime::Operation> new_operation();

// A Work of a group that has not ended: its wait() will give `result`, or what `finish()` gives if
// that is not null; `kept` stays alive until then. A new reference; throws when there is no memory.
[[nodiscard]] PyObject* make_open_work(pybind11::object result = {}, pybind11::object finish = {},
                                       pybind11::object kept = {});
// Makes the Work of make_open_work(array) another array's, and gives the reference to the one that
// it was for; nullptr, with nothing done, if anybody but the caller has it, or it is of another
// kind.
[[nodiscard]] PyObject* take_over_work(PyObject* object, PyObject* array);
// The group has ended, and this came out; without `result`, what the Work was made for. Throws what
// finish() raises; then the Work is as open as before.
void fill_work(PyObject* object, PyObject* result);
void fill_work(PyObject* object);
// The same, and lets go of the caller's reference unless it throws.
void fill_and_drop_work(PyObject* object);
void fail_work(PyObject* object, PyObject* error);

void bind_work(pybind11::module_& module);

}  // namespace pycoll::bindings
