// Short operations for callers that hold a lock which other threads take while they hold that of
// the communicator (Python's GIL). Nothing here waits for another thread, or spins for longer than
// `patience`. Only short calls and messages move, and operations that run concurrently with these,
// so no reduction of a user runs meanwhile.
#pragma once

#include <memory>

#include "engine/engine_driver.h"

namespace pycoll::engine {

// Threads: any.
class BriefCalls {
 public:
  // `driver` outlives it.
  explicit BriefCalls(EngineDriver& driver) : driver_(driver) {}

  // Enters the call; false, with nothing started, if that would take longer. `operation` may belong
  // to the caller and must live until it is done. If it is not done on return, the caller drives
  // it. With `leave` the caller may instead leave it to the progress thread; see
  // EngineDriver::leave().
  [[nodiscard]] bool try_start(const std::shared_ptr<Call>& call, const std::byte* input,
                               std::byte* output, const std::shared_ptr<Operation>& operation,
                               Nanoseconds timeout, Nanoseconds patience, bool leave) const;
  // Starts a message of at most Call::kShortBytes. Requires: `operation` is on the heap.
  [[nodiscard]] bool try_start(const MessageRequest& request,
                               const std::shared_ptr<Operation>& operation, Nanoseconds timeout,
                               Nanoseconds patience, bool leave) const;
  // Drives `operation` for at most `patience`; it may not be done on return.
  void try_drive(const Operation& operation, Nanoseconds patience) const;

  // Whether a call in place has nothing to do: a single rank leaves its memory unchanged, and no
  // other operation runs, waits or has failed before it.
  bool rests_alone() const {
    const RankOperations& operations = std::as_const(driver_).engine().operations();
    return operations.peers.size() == 1 && operations.collectives.vacant() && !driver_.is_foreign();
  }
  // Runs the whole call in a communicator of one rank. False, with nothing done, if another thread
  // has the lock or a collective is in progress. Requires: the communicator has one rank.
  [[nodiscard]] bool try_alone(Call& call, const std::byte* input, std::byte* output,
                               Status* status) const;

 private:
  // Enters to start a short operation; with `leave` the progress thread exists then.
  [[nodiscard]] bool enter(std::unique_lock<Gate>& lock, bool leave) const;

  EngineDriver& driver_;
};

}  // namespace pycoll::engine
