// Memory of this process that ranks on the same host may read and write where it lies; what
// pycoll.empty() gives. A segment whose payload lies here need not be copied into a channel: it is
// lent. One that is received here, its sender may put here by itself.
//
// All of it is one anonymous file, sparse and as long as the machine's memory twice over, made for
// the first allocation and gone with the last. A peer maps the whole file once, through
// this process's descriptor in /proc; where that is refused, segments are copied as ever. A forked
// child shares the arrays of its parent, as it does any shared mapping, and allocates elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

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

// Hears of memory that goes back: what was noted about its addresses is true no more.
class ArenaWatcher {
 public:
  virtual ~ArenaWatcher() = default;

  // [begin, begin + bytes) was allocated at once and is free when this returns. Called on the
  // thread that frees, under the arena's lock: may take locks of its own, but of the arena's
  // functions call find() and generation() only.
  virtual void freed(const std::byte* begin, std::size_t bytes) = 0;
};

// What one allocate() gave.
struct ArenaBlock {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
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
  // The allocation that `data` lies in; empty if none does.
  ArenaBlock block_of(const std::byte* data);
  // Once freed, that allocation's addresses are never given again: somebody may still write there.
  // Nothing happens to memory that is none.
  void keep(const std::byte* data);

  // `watcher` hears of all memory that is freed from now on, until unwatch(), which returns when it
  // hears nothing any more. Watch the arena that the memory is from: a child of fork has another.
  void watch(ArenaWatcher& watcher);
  void unwatch(ArenaWatcher& watcher);

 private:
  bool open();
  void release(std::byte* memory);
  void vacate(std::size_t offset, std::size_t length);
  ArenaBlock locate(const std::byte* data) const;

  std::mutex mutex_;
  UniqueFd fd_;
  Mapping mapping_;
  int pid_ = 0;                                // whose arena it is
  std::map<std::size_t, std::size_t> taken_;   // offset to bytes wanted
  std::map<std::size_t, std::size_t> vacant_;  // offset to length; no two of them touch
  std::set<std::size_t> kept_;                 // offsets of allocations
  std::vector<ArenaWatcher*> watchers_;
  // Under the lock for writing.
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t generation_ = 0;
  std::uint64_t key_ = 0;
};

}  // namespace pycoll::transport::shm
