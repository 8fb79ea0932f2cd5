// Memory layout of a Work, for work.cpp, which waits for Works, and for work_object.cpp, which
// creates, fills and destroys them. Requires everywhere: the GIL.
#pragma once

#include <mutex>

#include "bindings/core/raw.h"
#include "bindings/core/work.h"

namespace pycoll::bindings {

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

  void forget() noexcept;  // a running operation keeps its arrays
};
using WorkType =
    CollectedType<WorkObject, &WorkObject::value, &WorkObject::kept, &WorkObject::finish>;

inline PyTypeObject* work_type = nullptr;

inline WorkObject* as_work(PyObject* object) { return &WorkType::of(object); }

// Takes the ended operation out of `running`. If nothing else refers to it, it is reset for reuse.
void let_go(Running& running);

// Slot of the type, which reuses the memory of Works.
void dealloc_work(PyObject* object);

}  // namespace pycoll::bindings
