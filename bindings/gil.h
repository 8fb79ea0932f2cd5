// How this folder gives the GIL away and takes it: no other code here does either.
//
// Python ends a thread that takes the GIL after the interpreter's end. Up to Python 3.13 it calls
// pthread_exit(), whose unwinding must pass no destructor: one ends the process ("terminate
// called"), and others would touch Python objects without the GIL. Newer versions let the thread
// hang. Here the thread parks in every version: it waits for the process's end, in the frame that
// wanted the GIL, and no frame above it ends. It may hold locks, see CommunicatorHandle::discard().
#pragma once

#include <pybind11/pybind11.h>

#include <cxxabi.h>

namespace pycoll::bindings {

[[noreturn]] void park() noexcept;

// What `body` gives; the thread parks if Python ends it inside. `body` holds nothing that would
// have to be destroyed: that happens before it parks.
template <typename Body>
auto or_park(Body body) {
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    park();
  }
}

// The only way in which this folder calls what may be Python code; as PyObject_Vectorcall().
[[nodiscard]] inline PyObject* call_python(PyObject* callable, PyObject* const* arguments,
                                           std::size_t count, PyObject* names) {
  return or_park([&] { return PyObject_Vectorcall(callable, arguments, count, names); });
}

// The same for arguments by position; throws what was raised.
template <typename... Arguments>
pybind11::object call_python(const pybind11::object& callable, const Arguments&... arguments) {
  PyObject* all[] = {nullptr, arguments.ptr()...};
  PyObject* made = call_python(callable.ptr(), all + 1,
                               sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (made == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

// Without the GIL for as long as this lives. Requires: the GIL.
class ReleasedGil {
 public:
  ReleasedGil();
  ~ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* outer_;  // of this thread's ReleasedGil around this one
};

// With the GIL for as long as this lives. Threads: any.
class TakenGil {
 public:
  TakenGil();
  ~TakenGil();
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;

 private:
  PyThreadState* own_;  // what this thread released further out; nullptr: Python made one
  PyGILState_STATE made_ = PyGILState_UNLOCKED;
};

// Whether the interpreter ends or has ended, so that only one thread can have the GIL again.
[[nodiscard]] bool interpreter_ends();

}  // namespace pycoll::bindings
