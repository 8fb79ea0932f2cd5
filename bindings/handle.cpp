#include "bindings/handle.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/user_op.h"

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
    // No thread or memory to be had: the process's end must do.
    [[maybe_unused]] auto* left_behind = native.release();
  }
}

// A reduction's garbage collection may find this, inside the lock that closing needs. Behind the
// interpreter's end a thread may have parked there for ever; then the process's end must do, too.
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

void CommunicatorHandle::keep(std::shared_ptr<runtime::Operation> operation, py::object objects) {
  if (!operation->done()) kept_.push_back({std::move(operation), std::move(objects)});
}

// What goes may run any Python code, which may come back here.
void CommunicatorHandle::drop_some() {
  while (!kept_.empty() && kept_.front().operation->done()) {
    const Kept gone = std::move(kept_.front());
    kept_.pop_front();
  }
  // Only messages end out of order: to look at all of them now and then is enough.
  if (++visits_ < kept_.size()) return;
  visits_ = 0;
  const auto running = [](const Kept& one) { return !one.operation->done(); };
  const auto done = std::stable_partition(kept_.begin(), kept_.end(), running);
  const std::vector<Kept> going(std::make_move_iterator(done),
                                std::make_move_iterator(kept_.end()));
  kept_.erase(done, kept_.end());
}

Nanoseconds CommunicatorHandle::timeout() const { return nanoseconds(timeout_s); }

}  // namespace pycoll::bindings
