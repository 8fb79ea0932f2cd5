// Where the arrays of a message lie side by side.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace pycoll::bindings {

// Grows and is kept, since its pages are warm. Other ranks read and write it where it lies, as they
// do with NumPy's long arrays (numpy::SharedArrays): 64 arrays of 256 bytes or 1 KiB take 0.7 of
// the time that they take by way of channels. After a fork they do not, until it grows. Who has a
// message under way has moved it to where no other thread finds it.
class FusionMemory {
 public:
  FusionMemory() = default;
  FusionMemory(FusionMemory&& other) noexcept { *this = std::move(other); }
  FusionMemory& operator=(FusionMemory&& other) noexcept {
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
};

}  // namespace pycoll::bindings
