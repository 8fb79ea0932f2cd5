// Memory of the arena of this process, as arrays of pycoll.empty() have it.
#pragma once

#include <cstddef>
#include <cstring>

#include "shared_memory/shm_arena.h"
#include "tests/cpp/support/check.h"

namespace pycoll::testing {

// Filled with sevens.
class Block {
 public:
  explicit Block(std::size_t bytes,
                 transport::shm::InChild in_child = transport::shm::InChild::kShared)
      : data_(transport::shm::Arena::of_process().allocate(bytes, in_child)), bytes_(bytes) {
    CHECK(data_ != nullptr, "no %zu bytes of arena", bytes);
    std::memset(data_, 7, bytes);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { free(); }

  // Before its time.
  void free() {
    if (data_ != nullptr) transport::shm::Arena::free(data_);
    data_ = nullptr;
  }
  std::byte* data() { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

}  // namespace pycoll::testing
