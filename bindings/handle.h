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
  // Keeps arrays and user operations of a non-blocking operation alive until it is done, whether or
  // not somebody holds its Work.
  void keep(std::shared_ptr<runtime::Operation> operation, pybind11::object objects);
  void drop_done() {
    if (!kept_.empty()) drop_some();
  }
  Nanoseconds timeout() const;

 private:
  struct Kept {
    std::shared_ptr<runtime::Operation> operation;
    pybind11::object objects;
  };

  void discard();
  void drop_some();

  std::deque<Kept> kept_;
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
