#include "bindings/core/handle.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/core/user_op.h"

namespace pycoll::bindings {

Nanoseconds nanoseconds(double seconds) {
  if (!(seconds > 0)) return 0;
  return seconds >= 9e9 ? kForever : static_cast<Nanoseconds>(seconds * 1e9);
}

void refuse_inside_reduction(std::string_view what) {
  if (!UserOp::running()) return;
  raise_if_failed(Status::error(Code::kInvalidArgument,
                                std::string(what) + " was called by a user's reduction: a "
                                                    "reduction may only combine its two arrays"),
                  what);
}

bool signal_raised() {
  const TakenGil gil;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

CommunicatorHandle::~CommunicatorHandle() {
  try {
    discard();
  } catch (const std::exception&) {
    // No thread or memory is available; the end of the process cleans up.
    [[maybe_unused]] auto* left_behind = native.release();
  }
}

// Garbage collection inside a reduction may destroy this handle while the reduction's thread holds
// the lock that closing needs; another thread then closes. After the end of the interpreter a
// thread may have parked with that lock for ever; then the end of the process cleans up.
void CommunicatorHandle::discard() {
  if (interpreter_ends() && UserOp::any_entered()) {
    [[maybe_unused]] auto* left_behind = native.release();
    return;
  }
  if (UserOp::running()) {
    std::thread([native = std::move(native), kept = std::move(kept_)]() mutable {
      native.reset();
      const TakenGil gil;
      kept.clear();
    }).detach();
    return;
  }
  close();
  const ReleasedGil release;
  native.reset();
}

void CommunicatorHandle::close() {
  if (native == nullptr) return;
  {
    const ReleasedGil release;
    native->close();
  }
  drop_done();
}

void CommunicatorHandle::keep(std::shared_ptr<engine::Operation> operation, py::object objects,
                              std::optional<Dropped> dropped) {
  if (operation->done()) return;
  kept_.push_back({std::move(operation), std::move(objects), std::move(dropped)});
}

void CommunicatorHandle::note_told(const Status& status) {
  if (!status.ok()) told_ = status.message();
}

namespace {

void raise_dropped(const Status& status, const CommunicatorHandle::Dropped& dropped,
                   const CommunicatorHandle& handle) {
  if (dropped.user_op != nullptr) dropped.user_op->rethrow();
  raise_if_failed(status, dropped.name, handle.native->names());
}

}  // namespace

// May also run while a Work is deallocated, possibly with a pending Python error.
void CommunicatorHandle::report(const Status& status, const Dropped& dropped) noexcept {
  // A program that closes a communicator expects its operations to end. After a failure of the
  // whole communicator, calls raise a longer text that ends with this one.
  if (status.ok() || status.code() == Code::kClosed || told_.ends_with(status.message())) return;
  if (interpreter_ends()) return;
  const py::error_scope kept;
  try {
    told_ = status.message();
    untold_ = status;
    untold_from_ = {dropped.name, nullptr};
    try {
      raise_dropped(status, dropped, *this);
    } catch (py::error_already_set& error) {
      const std::string name =
          "a Work of " + std::string(dropped.name) + " that was dropped before wait()";
      error.restore();
      const auto what = py::reinterpret_steal<py::object>(PyUnicode_FromString(name.c_str()));
      or_park([&] { PyErr_WriteUnraisable(what.ptr()); });
    }
  } catch (const std::exception& error) {
    // No memory for the text; the next call raises the error.
    PyErr_SetString(PyExc_MemoryError, error.what());
    or_park([] { PyErr_WriteUnraisable(nullptr); });
  }
}

bool CommunicatorHandle::tell() {
  const Status status = std::exchange(untold_, Status());
  try {
    raise_dropped(status, untold_from_, *this);
  } catch (py::error_already_set& error) {
    error.restore();
    return false;
  }
  return true;
}

// Destroying an entry may run Python code, which may call this function again.
void CommunicatorHandle::drop_some() {
  const auto end = [this](const Kept& gone) {
    if (gone.dropped) report(gone.operation->status(), *gone.dropped);
  };
  while (!kept_.empty() && kept_.front().operation->done()) {
    const Kept gone = std::move(kept_.front());
    kept_.pop_front();
    end(gone);
  }
  // Only messages end out of order, so it is enough to check all entries occasionally.
  if (++visits_ < kept_.size()) return;
  visits_ = 0;
  const auto running = [](const Kept& one) { return !one.operation->done(); };
  const auto done = std::stable_partition(kept_.begin(), kept_.end(), running);
  const std::vector<Kept> going(std::make_move_iterator(done),
                                std::make_move_iterator(kept_.end()));
  kept_.erase(done, kept_.end());
  std::for_each(going.begin(), going.end(), end);
}

Nanoseconds CommunicatorHandle::timeout() const { return nanoseconds(timeout_s); }

}  // namespace pycoll::bindings
