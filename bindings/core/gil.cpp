#include "bindings/core/gil.h"

#include <unistd.h>
#include <csignal>

#include <utility>

namespace pycoll::bindings {
namespace {

// The thread state that this thread has released and not retaken.
thread_local PyThreadState* released = nullptr;

void take(PyThreadState* state) noexcept {
  or_park([&] { PyEval_RestoreThread(state); });
}

}  // namespace

void park() noexcept {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  for (;;) ::pause();
}

bool interpreter_ends() { return Py_IsInitialized() == 0; }

ReleasedGil::ReleasedGil() : outer_(std::exchange(released, PyEval_SaveThread())) {}

ReleasedGil::~ReleasedGil() { take(std::exchange(released, outer_)); }

TakenGil::TakenGil() : own_(std::exchange(released, nullptr)) {
  if (own_ != nullptr) {
    take(own_);
    return;
  }
  // A thread without a thread state must not ask for one after the end of the interpreter.
  if (PyGILState_GetThisThreadState() == nullptr && interpreter_ends()) park();
  or_park([&] { made_ = PyGILState_Ensure(); });
}

TakenGil::~TakenGil() {
  if (own_ != nullptr) {
    released = PyEval_SaveThread();
  } else {
    PyGILState_Release(made_);
  }
}

}  // namespace pycoll::bindings
