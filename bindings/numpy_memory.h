// NumPy's long arrays in memory that ranks on this host and RDMA devices reach.
#pragma once

#include <cstddef>
#include <string>

#include "bindings/bind.h"

namespace pycoll::transport::shm {
class Arena;
}

namespace pycoll::bindings::numpy {

// Shorter arrays are copied through channels: half of one is as short as what is copied anyway.
inline constexpr std::size_t kSharedBytesMin = std::size_t{8} << 10;

// NumPy keeps the handler of a context of Python's (each thread begins with one of its own) in a
// context variable, whose default value is a capsule that NumPy exports. SharedArrays points that
// capsule at a handler of ours, once and for ever, so all threads come here; SharedBlock sets the
// variable. Ours passes on to NumPy's what is short and what nobody wants to be shared.
//
// Nothing happens, and refusal() says why, where such memory has no huge pages, where NumPy has no
// such interface, and where somebody else has put a handler. A forked child has ordinary arrays,
// unless it makes one of these itself. With the GIL.

// While one of them lives NumPy takes the memory of long arrays, in all threads of this process but
// for contexts that have another handler, from where ranks on this host reach it.
class SharedArrays {
 public:
  SharedArrays();
  SharedArrays(const SharedArrays&) = delete;
  SharedArrays& operator=(const SharedArrays&) = delete;
  ~SharedArrays();

  const std::string& refusal() const { return refusal_; }

 private:
  transport::shm::Arena* arena_ = nullptr;  // of the process that made it; nullptr: does nothing
  std::string refusal_;
};

// The same from its making to leave() in one context of Python's, which makes and leaves it.
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

// A fork that would not isolate the child from arrays is refused with an OSError from now on, if
// it is Python's.
void guard_forks();

}  // namespace pycoll::bindings::numpy
