// Memory of this process that ranks on the same host may read and write in place.
// pycoll.empty() returns such memory, and NumPy's allocator does if the program enables it. A
// sender can expose a payload in the arena for a zero-copy read. A receiver can offer memory of its
// arena as a write window.
//
// The arena is one anonymous sparse file, longer than it will ever need to be. The first
// allocation creates it, and the end of the last one closes it unless stay() keeps it. A peer
// maps the whole file once, through this process's descriptor in /proc. If the system refuses
// that, segments are copied.
//
// Other folders include only this header of shared_memory/. It brings Mapping and the shared files
// of shm_memory.h along.
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
#include "shared_memory/shm_holes.h"
#include "shared_memory/shm_memory.h"

namespace pycoll::transport::shm {

// The data by which peers find an arena. Generations count the arenas of a process from 1; 0: none.
struct ArenaFile {
  std::uint64_t generation = 0;
  std::uint64_t bytes = 0;
  std::uint64_t key =
      0;  // random; the file begins with it, which distinguishes it from other files
  int fd = -1;
};

// Receives the ranges of freed memory, so that it can discard its records of them.
class ArenaWatcher {
 public:
  virtual ~ArenaWatcher() = default;

  // [begin, begin + bytes) was one allocation. When this returns it is free or no longer in the
  // file. Called on the thread that frees or forks, under the arena's lock: the function may take
  // other locks, but of the arena it must call only find() and generation().
  virtual void note_freed(const std::byte* begin, std::size_t bytes) = 0;
};

// One allocation.
struct ArenaBlock {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
};

// How a forked child sees an allocation.
enum class InChild : std::uint8_t {
  kShared,  // the same memory: parent and child see each other's writes
  kCopied,  // a copy, as with ordinary memory
};

enum class Content : std::uint8_t { kAny, kZeros };

// Any thread may call, except of_process() while another thread forks.
//
// Forks: a child allocates in an arena of its own. kCopied allocations leave the file before the
// process forks: addresses and content stay, but the memory becomes ordinary (detached), and find()
// no longer knows it. An allocation that an operation uses at that moment (Hold) stays in the file;
// the child's copy of it may change until the child writes to it. If the system cannot give a child
// its copies, the child ends with SIGABRT and a text before any of its code runs. ready_to_fork()
// detects that beforehand.
//
// Limit: O_DIRECT, io_uring and RDMA write to the pages behind an address. If one of them writes to
// a kCopied allocation while a fork is detaching it, the bytes are lost. The arena cannot detect
// that.
class Arena {
 public:
  // The size of a huge page of shared files. Allocations of at least this length start at a
  // multiple of it.
  static constexpr std::size_t kAlignment = std::size_t{2} << 20;
  // The alignment of shorter allocations, or the page size if that is larger.
  static constexpr std::size_t kGranule = std::size_t{4} << 10;
  // At most kShortsMax allocations at a time are kCopied and shorter than kShortBytes. Each may
  // become a mapping of its own in a fork, and a process may have 65,530 mappings by default.
  static constexpr std::size_t kShortBytes = std::size_t{64} << 10, kShortsMax = 4096;

  // Never destroyed, because arrays may outlive everything. A forked child gets its own arena.
  static Arena& of_process();

  // Returns memory, or nullptr if the arena has none; the caller then uses ordinary memory.
  // Requires: bytes > 0.
  [[nodiscard]] std::byte* allocate(std::size_t bytes, InChild in_child = InChild::kShared,
                                    Content content = Content::kAny);
  // An allocation of up to this many bytes has physical memory from the beginning. A longer one
  // gets memory when it is written.
  static std::size_t prepared_bytes_max();
  // Whether the system gives the arena huge pages. Without them its memory is slower than ordinary
  // memory.
  bool gives_huge_pages();
  // Frees an allocation. In a forked child, freeing the parent's memory only releases the child's
  // own copy of it.
  // Requires: `memory` is from allocate() of this process or of one that it was forked from.
  static void free(std::byte* memory);

  // Whether [data, data + bytes) is in the file; sets `offset` to its place. The result stays true
  // while the memory is allocated and the process does not fork. Takes no lock unless a part of the
  // arena is detached.
  bool find(const std::byte* data, std::size_t bytes, std::uint64_t* offset) const;
  // The generation of the memory that find() knows.
  std::uint64_t generation() const;
  ArenaFile file();
  // The allocation that contains `data`; empty if there is none.
  ArenaBlock block_of(const std::byte* data);
  // Whether `data` is memory of allocate(), of this process or of one that it was forked from,
  // detached or not. Takes no lock and makes no system call, because every free() calls it.
  static bool owns(const std::byte* data);
  // Retires the place of the allocation that contains `data`: a peer may still write there, and
  // must not reach another array. A kCopied allocation leaves the file now if the system allows it.
  // After the allocation is freed, its place is never allocated again. No effect on other memory.
  void keep(const std::byte* data);

  // Moves a detached allocation back into the file. False if [data, data + bytes) is not one whole
  // detached allocation, if it must stay detached, or if the system refuses.
  // Requires: no other thread uses the allocation meanwhile.
  [[nodiscard]] bool bring_back(const std::byte* data, std::size_t bytes);

  // Prepares the arena for a fork as the fork handlers do. False if the system refuses; then `why`
  // has the reason, the process must not fork, and some arrays may be detached already. The fork
  // handlers also cover memory that is allocated between this call and the fork.
  [[nodiscard]] static bool ready_to_fork(std::string* why);

  // Sets whether the file stays open without allocations, so that the next allocation finds it
  // open. False at first.
  void stay(bool stays);

  // Reports all memory that is freed from now on to `watcher`, until unwatch() returns. Watch the
  // arena that the memory is from: a forked child has another one.
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
    bool detached = false;  // ordinary memory at the same addresses, no longer in the file
    bool cached = false;    // freed, and kept for the next allocation of the same length

    // Whether it must leave the file before a fork.
    bool must_detach() const { return in_child == InChild::kCopied && holders == 0; }
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
  bool cache(Blocks::iterator block);
  void uncache(Blocks::iterator block);
  void uncache_all();
  void vacate(std::size_t offset, std::size_t length);
  bool gave_huge_page();
  void release_page(std::size_t page);
  void punch(std::size_t offset, std::size_t length) const;
  Blocks::iterator locate(const std::byte* data);

  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();
  [[nodiscard]] bool detach_all();
  [[nodiscard]] bool detach(std::size_t offset, Taken& taken);
  [[nodiscard]] bool reattach(std::size_t offset, std::size_t length);
  bool is_detached(const std::byte* data) const;
  std::uint64_t hold(const std::byte* data);
  void drop(const std::byte* data, std::uint64_t number);
  bool map_again(std::size_t offset, std::size_t length, int flags) const;

  static inline std::atomic<Arena*> current{nullptr};
  // The process id as of the last fork handler, because asking the system is slow.
  static inline std::atomic<int> process{0};

  std::mutex mutex_;
  UniqueFd fd_;
  Mapping mapping_;
  int pid_ = 0;              // of the process that the arena belongs to
  Arena* parent_ = nullptr;  // of the process that this one was forked from
  Blocks taken_;
  Holes vacant_;
  std::vector<Blocks::iterator> cached_;  // oldest first
  std::size_t shorts_ = 0;
  // By huge page: whether the page may have been written since the file was created, or since its
  // memory was released.
  std::vector<bool> used_;
  std::set<std::size_t> idle_;  // huge pages that are used and vacant
  bool stays_ = false;
  std::uint64_t numbers_ = 0;
  std::vector<ArenaWatcher*> watchers_;
  // Detached allocations, begin to end. Protected by detached_mutex_, which is locked last.
  mutable std::mutex detached_mutex_;
  std::map<const std::byte*, const std::byte*> detached_;
  std::atomic<std::size_t> detached_count_{0};
  // Written under mutex_ only.
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t generation_ = 0;
  std::uint64_t key_ = 0;
};

// Keeps one allocation in the file: while a Hold exists, peers may read and write the allocation
// that contains `data`. No effect on memory outside this process's arena. One thread at a time.
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
  // Whether the Hold has an allocation.
  bool holds() const { return number_ != 0; }

 private:
  void swap(Hold& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    std::swap(number_, other.number_);
  }

  Arena* arena_ = nullptr;
  const std::byte* data_ = nullptr;
  std::uint64_t number_ = 0;  // of the allocation; 0: none
};

}  // namespace pycoll::transport::shm
