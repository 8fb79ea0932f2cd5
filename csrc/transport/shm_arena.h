// Memory of this process that ranks on the same host may read and write where it lies; what
// pycoll.empty() gives, and NumPy to those who joined a world. A segment whose payload lies here
// need not be copied into a channel: it is lent. One that is received here, its sender may put here
// by itself.
//
// All of it is one anonymous file, sparse and longer than it will ever need to be, made for the
// first allocation and gone with the last. A peer maps the whole file once, through
// this process's descriptor in /proc; where that is refused, segments are copied as ever.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "transport/shm_holes.h"
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

  // [begin, begin + bytes) was allocated at once and is free when this returns, or no longer in the
  // file. Called on the thread that frees or forks, under the arena's lock: may take locks of its
  // own, but of the arena's functions call find() and generation() only.
  virtual void freed(const std::byte* begin, std::size_t bytes) = 0;
};

// What one allocate() gave.
struct ArenaBlock {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
};

// What a forked child has of an allocation.
enum class InChild : std::uint8_t {
  kShared,  // the same memory: what one writes the other reads
  kCopied,  // a copy, as of ordinary memory
};

enum class Content : std::uint8_t { kAny, kZeros };

// Any thread, except of_process() while a fork is under way in another.
//
// Forks. A child allocates elsewhere. What is kCopied leaves the file before the process forks:
// its addresses and what they hold stay, as ordinary memory, which find() knows no more. What an
// operation uses at that moment (Hold) stays in the file, and its child has a copy of it that may
// change until it is written to. A child that the system cannot give its copies ends with SIGABRT
// and a text before any of its code runs; ready_to_fork() tells beforehand.
//
// Devices and system calls that are writing to such memory by its pages (O_DIRECT, io_uring, RDMA)
// while it leaves the file write to pages that are nobody's: nothing here can see that.
class Arena {
 public:
  // Of what the kernel may have as one page of shared files; longer allocations begin there.
  static constexpr std::size_t kAlignment = std::size_t{2} << 20;
  // Where shorter ones begin, at least: at pages, if those are longer.
  static constexpr std::size_t kGranule = std::size_t{4} << 10;
  // Of allocations that are kCopied and shorter than this there are at most so many at a time. Each
  // may become a mapping of its own in a fork, and a process may have 65,530 of these.
  static constexpr std::size_t kShortBytes = std::size_t{64} << 10, kShortsMax = 4096;

  // Never destroyed: arrays may outlive everything. A child of fork gets one of its own.
  static Arena& of_process();

  // Memory, or nullptr where there is no such (left): take ordinary memory.
  // Requires: bytes > 0.
  [[nodiscard]] std::byte* allocate(std::size_t bytes, InChild in_child = InChild::kShared,
                                    Content content = Content::kAny);
  // Up to so many bytes an allocation has its memory from the beginning; a longer one gets it as it
  // is written, perhaps never.
  static std::size_t prepared_bytes_max();
  // Whether memory comes in huge pages here, which is what makes it as quick as ordinary memory.
  bool gives_huge_pages();
  // Requires: allocate() of this process or of one that it was forked from gave `memory`. In a
  // child it does nothing, since the parent has the memory still.
  static void free(std::byte* memory);

  // The file that holds all of [data, data + bytes), and where in it; false if none does. Stays
  // true while that memory is allocated and the process does not fork. Takes no lock, unless
  // something has left the file.
  bool find(const std::byte* data, std::size_t bytes, std::uint64_t* offset) const;
  // Of the memory that find() knows.
  std::uint64_t generation() const;
  ArenaFile file();
  // The allocation that `data` lies in; empty if none does.
  ArenaBlock block_of(const std::byte* data);
  // Whether that is memory of allocate(), of this process or of one that it was forked from, in the
  // file or not. Takes no lock and asks nobody: for all that is freed.
  static bool owns(const std::byte* data);
  // Somebody may still write to that allocation, of which nobody must hear: what is kCopied leaves
  // the file now, if the system lets it, and once freed its place is never given again. Nothing
  // happens to memory that is none.
  void keep(const std::byte* data);

  // That allocation, all of it, is the file's again if it left it for a fork; false if not, or it
  // must not. Requires: nobody else uses it meanwhile.
  [[nodiscard]] bool bring_back(const std::byte* data, std::size_t bytes);

  // Does what a fork of this process does first. False where the system refuses, with `why`: then
  // no fork may follow, and some arrays may have left the file, no more. What is allocated between
  // this call and the fork is looked at again there.
  [[nodiscard]] static bool ready_to_fork(std::string* why);

  // Whether the file stays when its last allocation has gone, for the next. Not at first.
  void stay(bool stays);

  // `watcher` hears of all memory that is freed from now on, until unwatch(), which returns when it
  // hears nothing any more. Watch the arena that the memory is from: a child of fork has another.
  void watch(ArenaWatcher& watcher);
  void unwatch(ArenaWatcher& watcher);

 private:
  friend class Hold;

  struct Taken {
    std::size_t bytes = 0;
    InChild in_child = InChild::kShared;
    std::uint64_t number = 0;  // of the allocation; 0 for none
    int holders = 0;
    bool kept = false;
    bool apart = false;    // no longer in the file
    bool resting = false;  // freed: memory of nobody

    // Whether it must be out of the file before a fork.
    bool leaves() const { return in_child == InChild::kCopied && holders == 0; }
    bool is_short() const { return in_child == InChild::kCopied && bytes < kShortBytes; }
  };
  using Blocks = std::map<std::size_t, Taken>;  // by offset

  [[nodiscard]] bool open();
  void close();
  void release(std::byte* memory);
  void forget(const std::byte* data);
  static std::size_t length_of(std::size_t bytes);
  [[nodiscard]] bool reuse(const Taken& taken, std::size_t* offset);
  [[nodiscard]] bool take(std::size_t length, std::size_t* offset);
  void prepare(std::unique_lock<std::mutex>& lock, std::size_t offset, std::size_t bytes,
               Content content);
  bool rest(Blocks::iterator block);
  void wake(Blocks::iterator block);
  void wake_all();
  void vacate(std::size_t offset, std::size_t length);
  bool gave_huge_page();
  void give_back(std::size_t page);
  void punch(std::size_t offset, std::size_t length) const;
  Blocks::iterator locate(const std::byte* data);

  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();
  [[nodiscard]] bool set_all_apart();
  [[nodiscard]] bool set_apart(std::size_t offset, Taken& taken);
  [[nodiscard]] bool rejoin(std::size_t offset, std::size_t length);
  bool is_apart(const std::byte* data) const;
  std::uint64_t hold(const std::byte* data);
  void drop(const std::byte* data, std::uint64_t number);
  bool map_again(std::size_t offset, std::size_t length, int flags) const;

  static inline std::atomic<Arena*> current{nullptr};
  static inline std::atomic<int> process{0};  // as fork handlers know: to ask the system takes long

  std::mutex mutex_;
  UniqueFd fd_;
  Mapping mapping_;
  int pid_ = 0;              // whose arena it is
  Arena* parent_ = nullptr;  // of the process that this one was forked from
  Blocks taken_;
  Holes vacant_;
  std::vector<Blocks::iterator> resting_;  // the oldest first
  std::size_t shorts_ = 0;
  // By huge page: whether something may have been written there since the file was made, or since
  // its memory was given back.
  std::vector<bool> used_;
  std::set<std::size_t> idle_;  // huge pages that are used, and vacant
  bool stays_ = false;
  std::uint64_t numbers_ = 0;
  std::vector<ArenaWatcher*> watchers_;
  // Allocations that are apart, begin to end; under a lock of their own, which is taken last.
  mutable std::mutex apart_mutex_;
  std::map<const std::byte*, const std::byte*> apart_;
  std::atomic<std::size_t> apart_count_{0};
  // Under the first lock for writing.
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t generation_ = 0;
  std::uint64_t key_ = 0;
};

// While it lives peers may read and write the allocation that `data` lies in, if it is one of this
// process, so that it must not leave the file. One thread at a time.
class Hold {
 public:
  Hold() = default;
  explicit Hold(const std::byte* data);
  Hold(Hold&& other) noexcept { swap(other); }
  Hold& operator=(Hold&& other) noexcept {
    swap(other);
    return *this;
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() {
    if (number_ != 0) arena_->drop(data_, number_);
  }
  // Whether the memory is the arena's.
  bool holds() const { return number_ != 0; }

 private:
  void swap(Hold& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    std::swap(number_, other.number_);
  }

  Arena* arena_ = nullptr;
  const std::byte* data_ = nullptr;
  std::uint64_t number_ = 0;  // of the allocation; 0: nothing is held
};

}  // namespace pycoll::transport::shm
