// The behaviour of an arena when its process forks: shared memory looks like ordinary memory to
// parent and child.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "shared_memory/shm_arena.h"

namespace pycoll::transport::shm {
namespace {

// The arena whose locks this thread holds while it forks.
thread_local Arena* forking = nullptr;
// The reason (errno) for which the child of that fork must not run; 0: it may run.
thread_local int refusal = 0;

std::string refused(int error) {
  std::string text =
      "pycoll: this process cannot fork, since a child would share its arrays instead of having "
      "copies: ";
  text += std::strerror(error);
  if (error == ENOMEM) {
    text += " (too many mappings, see vm.max_map_count, or no memory)";
  } else if (error == EAGAIN) {
    text += " (too much locked memory, see ulimit -l)";
  }
  return text + "; set PYCOLL_SHARED_ARRAYS=0, or start children with 'spawn'";
}

// Ends a process that must not continue.
[[noreturn]] void die(const std::string& text) {
  const std::string line = text + "\n";
  (void)!::write(STDERR_FILENO, line.data(), line.size());
  std::abort();
}

// The mappings that a refused fork must leave free for the rest of the process.
constexpr std::size_t kSpareMappings = 64;

// The number of further mappings that the process may have; SIZE_MAX if the system does not tell.
std::size_t mappings_left() {
  std::ifstream limit("/proc/sys/vm/max_map_count");
  std::size_t most = 0;
  if (!(limit >> most)) return SIZE_MAX;
  std::ifstream maps("/proc/self/maps", std::ios::binary);
  const std::istreambuf_iterator<char> begin(maps), none;
  const auto have = static_cast<std::size_t>(std::count(begin, none, '\n'));
  return most > have ? most - have : 0;
}

bool is_mapped(void* page) {
  unsigned char resident = 0;
  return ::mincore(page, 1, &resident) == 0 || errno != ENOMEM;
}

// Gives every page of private memory its own copy by a write that does not change the value. Other
// threads may write meanwhile: a failed exchange means that another thread has just written.
void copy_pages(std::byte* memory, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < bytes; at += page) {
    auto* first = reinterpret_cast<unsigned char*>(memory + at);
    unsigned char found = __atomic_load_n(first, __ATOMIC_RELAXED);
    (void)__atomic_compare_exchange_n(first, &found, found, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED);
  }
}

}  // namespace

bool Arena::ready_to_fork(std::string* why) {
  Arena* arena = current.load(std::memory_order_acquire);
  if (arena == nullptr || arena->pid_ != process.load(std::memory_order_relaxed)) return true;
  const std::lock_guard lock(arena->mutex_);
  arena->uncache_all();
  const auto leaving = static_cast<std::size_t>(std::count_if(
      arena->taken_.begin(), arena->taken_.end(),
      [](const auto& entry) { return entry.second.must_detach() && !entry.second.detached; }));
  // Each detachment may split one mapping into three.
  errno = ENOMEM;
  const bool fits = leaving == 0 || 2 * leaving + kSpareMappings <= mappings_left();
  if (fits && arena->detach_all()) return true;
  *why = refused(errno);
  return false;
}

// Stops at the first allocation that the system refuses to detach; returns false and sets errno.
bool Arena::detach_all() {
  uncache_all();
  for (auto& [offset, taken] : taken_) {
    if (taken.must_detach() && !detach(offset, taken)) return false;
  }
  return true;
}

void Arena::before_fork() {
  Arena* arena = current.load(std::memory_order_acquire);
  if (arena == nullptr || arena->pid_ != ::getpid()) return;
  arena->mutex_.lock();
  refusal = arena->detach_all() ? 0 : errno;
  arena->detached_mutex_.lock();
  forking = arena;
}

void Arena::after_fork_in_parent() {
  if (forking == nullptr) return;
  forking->detached_mutex_.unlock();
  forking->mutex_.unlock();
  forking = nullptr;
}

// Makes held allocations private to the child, so that peers write to the parent's memory only.
void Arena::after_fork_in_child() {
  process.store(::getpid(), std::memory_order_relaxed);
  if (forking == nullptr) return;
  if (refusal != 0) die(refused(refusal));
  for (const auto& [offset, taken] : forking->taken_) {
    if (taken.in_child != InChild::kCopied || taken.detached) continue;
    if (!forking->map_again(offset, length_of(taken.bytes), MAP_PRIVATE)) die(refused(errno));
  }
  after_fork_in_parent();
}

// Detaches an allocation. The system replaces shared pages by private ones in one step, so that a
// write of another thread reaches one or the other. Then every page gets a copy, and the file's
// pages are released. If the system refuses, nothing changes: false, and errno is set.
bool Arena::detach(std::size_t offset, Taken& taken) {
  if (taken.detached) return true;
  const std::size_t length = length_of(taken.bytes);
  std::byte* memory = mapping_.data() + offset;
  if (!map_again(offset, length, MAP_PRIVATE)) return false;
  for (ArenaWatcher* watcher : watchers_) watcher->note_freed(memory, taken.bytes);
  copy_pages(memory, length);
  punch(offset, length);
  taken.detached = true;
  const std::lock_guard lock(detached_mutex_);
  detached_.emplace(memory, memory + length);
  detached_count_.store(detached_.size(), std::memory_order_release);
  return true;
}

// Maps the file at these addresses again; the file's content replaces the private memory.
bool Arena::reattach(std::size_t offset, std::size_t length) {
  if (!map_again(offset, length, MAP_SHARED)) return false;
  const std::lock_guard lock(detached_mutex_);
  detached_.erase(mapping_.data() + offset);
  detached_count_.store(detached_.size(), std::memory_order_release);
  return true;
}

// Maps the same part of the file again with `flags`. It uses the system call instead of mmap(),
// because ThreadSanitizer takes mmap() for a write, and other threads may be using this memory. If
// the system refuses, the old mapping stays: false, and errno is set.
bool Arena::map_again(std::size_t offset, std::size_t length, int flags) const {
  void* place = mapping_.data() + offset;
  const auto map = [&](int how) {
    return ::syscall(SYS_mmap, place, length, PROT_READ | PROT_WRITE, how | MAP_FIXED, fd_.get(),
                     static_cast<off_t>(offset)) != -1;
  };
  if (map(flags)) {
    (void)::madvise(place, length, MADV_HUGEPAGE);
    return true;
  }
  const int error = errno;
  // With strict overcommit some kernels remove the old mapping before they find that the new one is
  // too large. The file still has the whole content.
  if (!is_mapped(place) && !map(MAP_SHARED)) die(refused(errno));
  errno = error;
  return false;
}

// Frees an array of the parent in this child: its private copies are released.
void Arena::forget(const std::byte* data) {
  std::unique_lock lock(mutex_);
  const auto found = locate(data);
  if (found == taken_.end()) {
    lock.unlock();
    if (parent_ != nullptr) parent_->forget(data);
    return;
  }
  const auto& [offset, taken] = *found;
  if (taken.in_child != InChild::kCopied) return;
  (void)::madvise(mapping_.data() + offset, length_of(taken.bytes), MADV_DONTNEED);
  taken_.erase(found);
}

bool Arena::is_detached(const std::byte* data) const {
  if (detached_count_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(detached_mutex_);
  const auto behind = detached_.upper_bound(data);
  return behind != detached_.begin() && data < std::prev(behind)->second;
}

// Returns the number of the allocation; 0 if it is kShared, detached or not in the arena.
std::uint64_t Arena::hold(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  const auto found = locate(data);
  if (found == taken_.end()) return 0;
  Taken& taken = found->second;
  if (taken.in_child == InChild::kShared || taken.detached) return 0;
  ++taken.holders;
  return taken.number;
}

void Arena::drop(const std::byte* data, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = locate(data);
  if (found != taken_.end() && found->second.number == number) --found->second.holders;
}

Hold::Hold(const std::byte* data)
    : arena_(Arena::current.load(std::memory_order_acquire)), data_(data) {
  std::uint64_t offset = 0;
  if (arena_ != nullptr && arena_->find(data, 1, &offset)) number_ = arena_->hold(data);
}

}  // namespace pycoll::transport::shm
