// What becomes of an arena when its process forks: shared memory that looks to parent and child as
// if it were ordinary.
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

#include "transport/shm_arena.h"

namespace pycoll::transport::shm {
namespace {

// Whose locks this thread holds while it forks.
thread_local Arena* forking = nullptr;
// Why the child of that fork must not run; 0: it may. An errno.
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

// The last words of a process that must not go on.
[[noreturn]] void end(const std::string& text) {
  const std::string line = text + "\n";
  (void)!::write(STDERR_FILENO, line.data(), line.size());
  std::abort();
}

// What a refused fork must leave to the rest of the process.
constexpr std::size_t kSpareMappings = 64;

// How many mappings the process may still have; very many where the system does not say.
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

// Gives every page of private memory a copy of its own: by a write that changes nothing, whatever
// other threads write there. If that fails, one of them has just written.
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
  arena->wake_all();
  const auto leaving = static_cast<std::size_t>(std::count_if(
      arena->taken_.begin(), arena->taken_.end(),
      [](const auto& entry) { return entry.second.leaves() && !entry.second.apart; }));
  // Each may split one mapping in three.
  errno = ENOMEM;
  const bool fits = leaving == 0 || 2 * leaving + kSpareMappings <= mappings_left();
  if (fits && arena->set_all_apart()) return true;
  *why = refused(errno);
  return false;
}

// False, and errno, at the first that the system leaves where it is.
bool Arena::set_all_apart() {
  wake_all();
  for (auto& [offset, taken] : taken_) {
    if (taken.leaves() && !set_apart(offset, taken)) return false;
  }
  return true;
}

void Arena::before_fork() {
  Arena* arena = current.load(std::memory_order_acquire);
  if (arena == nullptr || arena->pid_ != ::getpid()) return;
  arena->mutex_.lock();
  refusal = arena->set_all_apart() ? 0 : errno;
  arena->apart_mutex_.lock();
  forking = arena;
}

void Arena::after_fork_in_parent() {
  if (forking == nullptr) return;
  forking->apart_mutex_.unlock();
  forking->mutex_.unlock();
  forking = nullptr;
}

// What peers may be writing to stays the parent's.
void Arena::after_fork_in_child() {
  process.store(::getpid(), std::memory_order_relaxed);
  if (forking == nullptr) return;
  if (refusal != 0) end(refused(refusal));
  for (const auto& [offset, taken] : forking->taken_) {
    if (taken.in_child != InChild::kCopied || taken.apart) continue;
    if (!forking->map_again(offset, length_of(taken.bytes), MAP_PRIVATE)) end(refused(errno));
  }
  after_fork_in_parent();
}

// The system swaps shared pages for private ones in one step, so that writes of other threads go to
// the one or the other; then every page gets a copy, and the file's go back. False, and errno,
// where the system refuses: then nothing has changed.
bool Arena::set_apart(std::size_t offset, Taken& taken) {
  if (taken.apart) return true;
  const std::size_t length = length_of(taken.bytes);
  std::byte* memory = mapping_.data() + offset;
  if (!map_again(offset, length, MAP_PRIVATE)) return false;
  for (ArenaWatcher* watcher : watchers_) watcher->freed(memory, taken.bytes);
  copy_pages(memory, length);
  punch(offset, length);
  taken.apart = true;
  const std::lock_guard lock(apart_mutex_);
  apart_.emplace(memory, memory + length);
  apart_count_.store(apart_.size(), std::memory_order_release);
  return true;
}

// Freed, so that the addresses may be the file's again.
bool Arena::rejoin(std::size_t offset, std::size_t length) {
  if (!map_again(offset, length, MAP_SHARED)) return false;
  const std::lock_guard lock(apart_mutex_);
  apart_.erase(mapping_.data() + offset);
  apart_count_.store(apart_.size(), std::memory_order_release);
  return true;
}

// What is there stays, so that other threads may be writing: mmap() itself passes for a write with
// those who watch accesses, as ThreadSanitizer does, the system call not. False, and errno, where
// the system refuses: what was mapped there still is.
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
  // Where memory may not be promised beyond what there is, some kernels take away what was mapped
  // before they find that the new mapping is too much. The file has all of it still.
  if (!is_mapped(place) && !map(MAP_SHARED)) end(refused(errno));
  errno = error;
  return false;
}

// A parent's array, which this child needs no more: what copies it has go back.
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

bool Arena::is_apart(const std::byte* data) const {
  if (apart_count_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(apart_mutex_);
  const auto behind = apart_.upper_bound(data);
  return behind != apart_.begin() && data < std::prev(behind)->second;
}

// The number of the allocation; 0: a child shares it, or it is none of the file.
std::uint64_t Arena::hold(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  const auto found = locate(data);
  if (found == taken_.end()) return 0;
  Taken& taken = found->second;
  if (taken.in_child == InChild::kShared || taken.apart) return 0;
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
