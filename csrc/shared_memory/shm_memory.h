// The descriptors and mappings of the shared-memory transport. Errors name the rank and the remedy.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "base/unique_fd.h"

namespace pycoll::transport::shm {

// A part of a file in this process's address space. The destructor unmaps
// it. Movable, not copyable.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Maps [offset, offset + bytes) of `fd`, shared, at a multiple of `alignment` (a power of two; 1:
  // any address).
  // Requires: `offset` is a multiple of the page size; the file is sealed against shrinking below
  // offset + bytes, because touching the memory would otherwise raise SIGBUS.
  static Status map(int fd, std::size_t offset, std::size_t bytes, bool writable, Mapping* made,
                    std::size_t alignment = 1);

  // Maps a long sparse file of which only the beginning is ever used. No part may be
  // touched before cover(). The part that cover() has not reached takes no memory, even if the
  // process has locked all its memory (mlockall).
  static Status map_bare(int fd, std::size_t bytes, std::size_t alignment, Mapping* made);
  // Allows access to the first `end` bytes of a map_bare(), and writes if `writable`. False if the
  // system refuses. One thread at a time.
  [[nodiscard]] bool cover(std::size_t end, bool writable);

  std::byte* data() const { return data_; }

 private:
  Mapping(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  static Status reserve(std::size_t bytes, std::size_t alignment, Mapping* made);
  static Status map_as(int fd, std::size_t offset, std::size_t bytes, int protection,
                       std::size_t alignment, Mapping* made);

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t covered_ = 0;  // after map_bare()
};

// Creates an anonymous file of `bytes` zeros that can neither shrink nor grow. It is in no folder,
// so it ends with its last mapping or descriptor, even if its owner is killed. /proc/PID/maps shows
// `title`.
Status create_shared_file(std::size_t bytes, UniqueFd* made, const char* title = "pycoll");

// Checks that `fd` is a file of `bytes` that cannot shrink. `peer` is for the error text.
Status check_shared_file(int fd, std::size_t bytes, int peer);

// barrier_everywhere() makes every processor that runs a registered process execute a full memory
// barrier. Each process that calls it, or that must be reached, calls register_barriers() once
// before. Both return false if the kernel refuses.
[[nodiscard]] bool register_barriers();
[[nodiscard]] bool barrier_everywhere();

}  // namespace pycoll::transport::shm
