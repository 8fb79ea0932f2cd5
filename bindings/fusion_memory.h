// Where the arrays of a message lie side by side.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace pycoll::bindings {

// Grows and is kept, since its pages are warm. Where it is `reachable` other ranks on the host and
// RDMA devices read and write it where it lies. A forked child shares it, and has no use for it.
// A message under way owns the memory: it has moved it to where no other thread finds it.
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

  // Room for so many bytes, which begins with a cache line and is this object's until the next
  // call; for none perhaps nullptr. Throws std::bad_alloc.
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
