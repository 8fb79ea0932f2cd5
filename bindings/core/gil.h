// All code of this folder releases and takes the GIL only through these functions.
//
// Python ends a thread that takes the GIL after the end of the interpreter. Up to Python 3.13 it
// calls pthread_exit(), which unwinds the stack. No destructor may run then: some end the process
// ("terminate called"), others would touch Python objects without the GIL. Newer versions let the
// thread hang. Here the thread parks in every version: it waits for the end of the process in the
// frame that wanted the GIL, and no outer frame ends. It may hold locks, see
// CommunicatorHandle::discard().
#pragma once

#include <pybind11/pybind11.h>

#include <cxxabi.h>

namespace pycoll::bindings {

[[noreturn]] void park() noexcept;

// Returns the result of `body`; the thread parks if Python ends it inside. `body` owns no objects
// with destructors: they would run before the thread parks.
template <typename Body>
auto or_park(Body body) {
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    park();
  }
}

// The only function with which this folder calls possible Python code; as PyObject_Vectorcall().
[[nodiscard]] inline PyObject* call_python(PyObject* callable, PyObject* const* arguments,
                                           std::size_t count, PyObject* names) {
  return or_park([&] { return PyObject_Vectorcall(callable, arguments, count, names); });
}

// Calls `callable` with these positional arguments; throws the Python exception.
template <typename... Arguments>
pybind11::object call_python(const pybind11::object& callable, const Arguments&... arguments) {
  PyObject* all[] = {nullptr, arguments.ptr()...};
  PyObject* made = call_python(callable.ptr(), all + 1,
                               sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (made == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

// Releases the GIL for its lifetime. Requires: the GIL.
class ReleasedGil {
 public:
  ReleasedGil();
  ~ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* outer_;  // the next outer ReleasedGil of this thread
};

// Holds the GIL for its lifetime. Threads: any.
class TakenGil {
 public:
  TakenGil();
  ~TakenGil();
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;

 private:
  // Released by an outer ReleasedGil of this thread; nullptr: Python created one.
  PyThreadState* own_;
  PyGILState_STATE made_ = PyGILState_UNLOCKED;
};

// Whether the interpreter is ending or has ended, so that only one thread can still get the GIL.
[[nodiscard]] bool interpreter_ends();

}  // namespace pycoll::bindings
