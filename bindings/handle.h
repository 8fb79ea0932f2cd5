// A communicator as Python holds it, and how its operations are started. Every way in releases the
// GIL before it waits for the communicator's lock: a user's reduction may want the GIL while that
// lock is held. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/communicator.h"

namespace pycoll::bindings {

class UserOp;

struct CommunicatorHandle {
  runtime::Communicator::Handle native;
  double timeout_s = 0;
  // No peer is a thread of this process, so that no peer can want the GIL while it is waited for.
  bool alone = true;

  CommunicatorHandle() = default;
  CommunicatorHandle(const CommunicatorHandle&) = delete;
  CommunicatorHandle& operator=(const CommunicatorHandle&) = delete;
  ~CommunicatorHandle();

  void close();
  // What is told of an operation whose Work is gone. `name` has static storage duration.
  struct Dropped {
    std::string_view name;
    std::shared_ptr<UserOp> user_op;
  };

  // Keeps arrays and user operations of a non-blocking operation alive until it is done, whether or
  // not somebody holds its Work; with `dropped`, nobody does.
  void keep(std::shared_ptr<runtime::Operation> operation, pybind11::object objects,
            std::optional<Dropped> dropped = std::nullopt);
  void drop_done() {
    if (!kept_.empty()) drop_some();
  }
  // The same in front of a call; false, with a Python error set, where an operation has failed and
  // nobody was told but by the unraisable hook.
  bool attend() {
    drop_done();
    return untold_.ok() || tell();
  }
  // The operation has failed and its Work is gone: the unraisable hook hears of it once, and so
  // does the next call, unless somebody was told of this failure already.
  void report(const Status& status, const Dropped& dropped) noexcept;
  // A call or a wait raises this.
  void note_told(const Status& status);
  Nanoseconds timeout() const;

 private:
  struct Kept {
    std::shared_ptr<runtime::Operation> operation;
    pybind11::object objects;
    std::optional<Dropped> dropped;
  };

  void discard();
  void drop_some();
  bool tell();

  std::deque<Kept> kept_;
  Status untold_;  // of a dropped Work, until the next call
  Dropped untold_from_;
  std::string told_;        // the failure that was told last
  std::size_t visits_ = 0;  // of drop_some() since it last looked at all
};
using SharedHandle = std::shared_ptr<CommunicatorHandle>;

// How long whoever waits keeps the GIL: about what giving it away and taking it again costs where
// another thread wants it. Nobody does where all ranks but this are processes.
inline constexpr Nanoseconds kSpin = 2'000;

// No time at all for what is negative or not a number.
Nanoseconds nanoseconds(double seconds);

// Throws InvalidArgumentError inside a reduction of the user: it runs under the communicator's
// lock, possibly on the progress thread.
void refuse_inside_reduction(std::string_view what);

// True with a Python error set when a signal's handler raised (Ctrl-C). Takes the GIL itself.
[[nodiscard]] bool signal_raised();

}  // namespace pycoll::bindings
