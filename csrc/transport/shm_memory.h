// Descriptors and mappings behind the shared-memory transport. Failures name the rank and say what
// to do.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "base/unique_fd.h"

namespace pycoll::transport::shm {

// Part of a file in this process's address space; unmapped by the destructor. Movable, not
// copyable.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Maps [offset, offset + bytes) of `fd`, shared. Requires: offset is a multiple of the page size,
  // and the file is sealed at no less than offset + bytes, else touching the memory may kill us.
  // The memory begins at a multiple of `alignment`, a power of two; 1: wherever the system likes.
  static Status map(int fd, std::size_t offset, std::size_t bytes, bool writable, Mapping* made,
                    std::size_t alignment = 1);

  // The same of a long sparse file, of which only a beginning is ever used: none of it may be
  // touched before cover(). What must not be touched takes no memory, not even where the process
  // has all of its memory locked (mlockall).
  static Status map_bare(int fd, std::size_t bytes, std::size_t alignment, Mapping* made);
  // From here on the first `end` bytes of a map_bare() may be touched, and written if `writable`;
  // false if the system refuses. One thread at a time.
  [[nodiscard]] bool cover(std::size_t end, bool writable);

  std::byte* data() const { return data_; }

 private:
  Mapping(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  static Status reserve(std::size_t bytes, std::size_t alignment, Mapping* made);
  static Status map_as(int fd, std::size_t offset, std::size_t bytes, int protection,
                       std::size_t alignment, Mapping* made);

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t covered_ = 0;  // of map_bare()
};

// A new anonymous file of `bytes` zeros that can neither shrink nor grow. It lies in no folder: the
// last mapping's end is its end, however its owner dies. `title` is what /proc/PID/maps shows.
Status create_segment(std::size_t bytes, UniqueFd* made, const char* title = "pycoll");

// Is `fd` a segment of `bytes` that cannot shrink under us? `peer` is for the text.
Status check_segment(int fd, std::size_t bytes, int peer);

// Makes every processor that runs this process or another registered one pass a full memory
// barrier. register_barriers() is needed once per process, on both sides; false where the kernel
// refuses.
[[nodiscard]] bool register_barriers();
[[nodiscard]] bool barrier_everywhere();

}  // namespace pycoll::transport::shm
