// Memory of this process that ranks on the same host may read where it lies; what pycoll.empty()
// gives. A segment whose payload lies here need not be copied into a channel: it is lent.
//
// All of it is one anonymous file, sparse and as long as the machine's memory twice over, made for
// the first allocation and gone with the last. A peer maps the whole file once, read-only, through
// this process's descriptor in /proc; where that is refused, segments are copied as ever. A forked
// child shares the arrays of its parent, as it does any shared mapping, and allocates elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "base/unique_fd.h"
#include "transport/shm_memory.h"

namespace pycoll::transport::shm {

// How peers find an arena. Generations count the arenas of a process from 1; 0: there is none.
struct ArenaFile {
  std::uint64_t generation = 0;
  std::uint64_t bytes = 0;
  std::uint64_t key = 0;  // random, and what the file begins with: so that it is no other file
  int fd = -1;
};

// Any thread, except of_process() while a fork is under way in another.
class Arena {
 public:
  // Allocations begin on pages of this size, in case the kernel has such for shared files.
  static constexpr std::size_t kAlignment = std::size_t{2} << 20;

  // Never destroyed: arrays may outlive everything. A child of fork gets one of its own.
  static Arena& of_process();

  // `bytes` of zeros, or nullptr where the system has no such memory (left): take ordinary memory.
  // Requires: bytes > 0.
  std::byte* allocate(std::size_t bytes);
  // Requires: allocate() of this process or of one that it was forked from gave `memory`. In a
  // child it does nothing, since the parent has the memory still.
  static void free(std::byte* memory);

  // The file that holds all of [data, data + bytes), and where in it; false if none does. Stays
  // true while that memory is allocated. Reads two words, takes no lock.
  bool find(const std::byte* data, std::size_t bytes, std::uint64_t* offset) const;
  // Of the memory that find() knows.
  std::uint64_t generation() const;
  ArenaFile file();

 private:
  bool open();
  void release(std::byte* memory);
  void vacate(std::size_t offset, std::size_t length);

  std::mutex mutex_;
  UniqueFd fd_;
  Mapping mapping_;
  int pid_ = 0;                                // whose arena it is
  std::map<std::size_t, std::size_t> taken_;   // offset to length
  std::map<std::size_t, std::size_t> vacant_;  // the same; no two of them touch
  // Under the lock for writing.
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t generation_ = 0;
  std::uint64_t key_ = 0;
};

}  // namespace pycoll::transport::shm
