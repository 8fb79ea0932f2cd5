// The buffer into which the arrays of a fused batch are copied.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace pycoll::bindings {

// Grows and is kept, because its pages are already mapped. If it is `reachable`, other ranks on the
// host and RDMA devices access it in place. A forked child shares it and must not use it. A message
// in progress is the memory's only owner, so no other thread uses the memory.
class FusionMemory {
 public:
  FusionMemory() = default;
  explicit FusionMemory(bool reachable) : reachable_(reachable) {}
  FusionMemory(FusionMemory&& other) noexcept { *this = std::move(other); }
  FusionMemory& operator=(FusionMemory&& other) noexcept {
    reachable_ = other.reachable_;
    bytes_ = std::exchange(other.bytes_, 0);
    memory_ = std::move(other.memory_);
    return *this;
  }

  // At least `bytes` bytes, aligned to a cache line. They stay valid until the next call, and
  // belong to this object. May be nullptr for 0 bytes. Throws std::bad_alloc.
  std::byte* of(std::size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };

  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
  bool reachable_ = false;
};

}  // namespace pycoll::bindings
