// What a Work is in memory, for work.cpp, in which Works are waited for, and for work_object.cpp,
// in which they come, are filled and go. Requires everywhere: the GIL.
#pragma once

#include <mutex>

#include "bindings/work.h"

namespace pycoll::bindings {

enum class Stage : std::uint8_t {
  kOpen,     // a member of a group that has not ended
  kRunning,  // `running` says what runs
  kGiven,    // `value` is the result
  kFailed,   // `value` is the exception
};

struct WorkObject {
  PyObject head;
  Running running;
  PyObject* value;        // the result, also while it is being made; an exception, or nullptr
  PyObject* kept;         // what the operation reads, or nullptr
  PyObject* finish;       // gives the result once the operation is done; nullptr: `value` is it
  std::mutex* finishing;  // with `finish`: several threads may wait, and it runs once
  Nanoseconds ended;      // of an operation that was let go of; 0 if that is not known
  Stage stage;
  bool told;  // wait() has raised the operation's failure
};

inline PyTypeObject* work_type = nullptr;

inline WorkObject* as_work(PyObject* object) { return reinterpret_cast<WorkObject*>(object); }

// The operation has ended: takes it out of `running`. If nobody else knows of it, it is as good as
// new.
void let_go(Running& running);

// Slots of the type.
int traverse_work(PyObject* object, visitproc visit, void* arg);
int clear_work(PyObject* object);
void dealloc_work(PyObject* object);

}  // namespace pycoll::bindings
