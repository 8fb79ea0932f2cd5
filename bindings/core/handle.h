// A communicator as Python holds it, and how its operations start. Every entry point releases the
// GIL before it waits for the communicator's lock: a user's reduction may need the GIL while
// another thread holds that lock. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/communicator.h"

namespace pycoll::bindings {

class UserOp;

struct CommunicatorHandle {
  engine::Communicator::Handle native;
  double timeout_s = 0;
  // No peer is a thread of this process, so no peer can need the GIL while this rank waits for it.
  bool alone = true;

  CommunicatorHandle() = default;
  CommunicatorHandle(const CommunicatorHandle&) = delete;
  CommunicatorHandle& operator=(const CommunicatorHandle&) = delete;
  ~CommunicatorHandle();

  void close();
  // Facts about an operation whose Work was dropped. `name` has static storage duration.
  struct Dropped {
    std::string_view name;
    std::shared_ptr<UserOp> user_op;
  };

  // Keeps arrays and user operations of a non-blocking operation alive until it is done. `dropped`
  // is set if its Work no longer exists.
  void keep(std::shared_ptr<engine::Operation> operation, pybind11::object objects,
            std::optional<Dropped> dropped = std::nullopt);
  void drop_done() {
    if (!kept_.empty()) drop_some();
  }
  // Call it before each operation: drops ended operations, as drop_done(). Returns false with a
  // Python error set if an operation whose Work was dropped has failed and no call has raised that
  // yet.
  bool attend() {
    drop_done();
    return untold_.ok() || tell();
  }
  // Reports the failure of an operation whose Work was dropped. The unraisable hook gets it once.
  // The next call raises it too, unless this failure has been raised already.
  void report(const Status& status, const Dropped& dropped) noexcept;
  // Records that a call or a wait raises this failure.
  void note_told(const Status& status);
  Nanoseconds timeout() const;

 private:
  struct Kept {
    std::shared_ptr<engine::Operation> operation;
    pybind11::object objects;
    std::optional<Dropped> dropped;
  };

  void discard();
  void drop_some();
  bool tell();

  std::deque<Kept> kept_;
  Status untold_;  // failure of an operation whose Work was dropped, until the next call
  Dropped untold_from_;
  std::string told_;        // the failure that was raised last
  std::size_t visits_ = 0;  // calls of drop_some() since it last checked all operations
};
using SharedHandle = std::shared_ptr<CommunicatorHandle>;

// Nanoseconds for which a waiting thread keeps the GIL. Releasing and retaking a contended GIL
// costs about as much. Used only if no other rank is a thread of this process.
inline constexpr Nanoseconds kSpin = 2'000;

// 0 for a negative number and for NaN.
Nanoseconds nanoseconds(double seconds);

// Throws InvalidArgumentError inside a reduction of the user, which runs under the communicator's
// lock and possibly on the progress thread.
void refuse_inside_reduction(std::string_view what);

// True with a Python error set if a signal handler has raised (Ctrl-C). Takes the GIL itself.
[[nodiscard]] bool signal_raised();

}  // namespace pycoll::bindings
