// Memory for long NumPy arrays that ranks on this host and RDMA devices can access in place.
#pragma once

#include <cstddef>
#include <string>

#include "bindings/core/errors.h"

namespace pycoll::transport::shm {
class Arena;
}

namespace pycoll::bindings::numpy {

// Shorter arrays are copied through channels: half of such an array is no longer than what is
// copied in any case.
inline constexpr std::size_t kSharedBytesMin = std::size_t{8} << 10;

// NumPy keeps the handler of a Python context in a context variable; each thread begins with a
// context of its own. The default value of the variable is a capsule that NumPy exports.
// SharedArrays points that capsule at a handler of pycoll, once per process, so all threads use it.
// SharedBlock sets the variable. The handler passes requests for short arrays, and all requests
// while sharing is off, to NumPy's handler.
//
// Nothing changes, and refusal() gives the reason, if such memory has no huge pages, if NumPy has
// no such interface, or if another library has installed a handler. A forked child has ordinary
// arrays, unless it creates one of these objects itself. With the GIL.

// While a SharedArrays exists, NumPy allocates long arrays in memory that ranks on this host can
// access. That holds in all threads of this process, except in contexts with another handler.
class SharedArrays {
 public:
  SharedArrays();
  SharedArrays(const SharedArrays&) = delete;
  SharedArrays& operator=(const SharedArrays&) = delete;
  ~SharedArrays();

  const std::string& refusal() const { return refusal_; }

 private:
  transport::shm::Arena* arena_ = nullptr;  // of the process that created it; nullptr: no effect
  std::string refusal_;
};

// Shares long arrays like SharedArrays, but only in one Python context, and from its construction
// to leave(). That context calls both.
class SharedBlock {
 public:
  SharedBlock();
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  ~SharedBlock();

  const std::string& refusal() const { return refusal_; }
  void leave();

 private:
  void unshare();

  transport::shm::Arena* arena_ = nullptr;
  py::object before_;  // the context's handler
  std::string refusal_;
};

// From now on, a fork by Python that would not isolate the child from shared arrays raises OSError.
void guard_forks();

}  // namespace pycoll::bindings::numpy
