// Native objects that end with the process that created them.
#pragma once

#include <unistd.h>

#include <exception>
#include <memory>

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"

namespace pycoll::bindings {

// A native object with threads and a device, which belongs to the process that created it. A forked
// child has neither thread nor device, and never destroys the object. All with the GIL.
template <typename Native>
class OfProcess {
 public:
  OfProcess() = default;
  ~OfProcess() {
    try {
      discard();
    } catch (const std::exception&) {
      [[maybe_unused]] auto* left_behind = native_.release();
    }
  }
  OfProcess(const OfProcess&) = delete;
  OfProcess& operator=(const OfProcess&) = delete;

  // Whether this process is a forked child.
  bool is_of_parent() const { return ::getpid() != pid_; }
  // Throws ClosedError in a forked child. Requires: made() holds an object.
  Native& get() const {
    if (is_of_parent()) {
      raise_if_failed(Status::error(Code::kClosed,
                                    "this communicator belongs to the parent process; a forked "
                                    "child cannot use its devices: start it with spawn"),
                      "");
    }
    return *native_;
  }
  // For the function that creates the object.
  std::unique_ptr<Native>* made() { return &native_; }

 private:
  // Waits for operations in progress, possibly for ranks that are threads and need the GIL.
  void discard() {
    if (is_of_parent()) {
      [[maybe_unused]] auto* parents = native_.release();
      return;
    }
    const ReleasedGil release;
    native_.reset();
  }

  std::unique_ptr<Native> native_;
  const pid_t pid_ = ::getpid();
};

}  // namespace pycoll::bindings
