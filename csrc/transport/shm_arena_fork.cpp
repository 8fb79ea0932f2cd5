// What becomes of an arena when its process forks: shared memory that looks to parent and child as
// if it were ordinary.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <iterator>

#include "transport/shm_arena.h"

namespace pycoll::transport::shm {
namespace {

// Whose locks this thread holds while it forks.
thread_local Arena* forking = nullptr;

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

void Arena::before_fork() {
  Arena* arena = current.load(std::memory_order_acquire);
  if (arena == nullptr || arena->pid_ != ::getpid()) return;
  arena->mutex_.lock();
  arena->wake_all();
  for (auto& [offset, taken] : arena->taken_) {
    if (taken.in_child == InChild::kCopied && taken.holders == 0) {
      arena->set_apart(offset, taken);
    }
  }
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
  for (const auto& [offset, taken] : forking->taken_) {
    if (taken.in_child != InChild::kCopied || taken.apart) continue;
    (void)forking->map_again(offset, length_of(taken.bytes), MAP_PRIVATE);
  }
  after_fork_in_parent();
}

// The system swaps shared pages for private ones in one step, so that writes of other threads go to
// the one or the other; then every page gets a copy, and the file's go back.
void Arena::set_apart(std::size_t offset, Taken& taken) {
  const std::size_t length = length_of(taken.bytes);
  std::byte* memory = mapping_.data() + offset;
  if (taken.apart || !map_again(offset, length, MAP_PRIVATE)) return;
  for (ArenaWatcher* watcher : watchers_) watcher->freed(memory, taken.bytes);
  copy_pages(memory, length);
  punch(offset, length);
  taken.apart = true;
  const std::lock_guard lock(apart_mutex_);
  apart_.emplace(memory, memory + length);
  apart_count_.store(apart_.size(), std::memory_order_release);
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
// those who watch accesses, as ThreadSanitizer does, the system call not.
bool Arena::map_again(std::size_t offset, std::size_t length, int flags) const {
  void* place = mapping_.data() + offset;
  if (::syscall(SYS_mmap, place, length, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd_.get(),
                static_cast<off_t>(offset)) == -1) {
    return false;
  }
  (void)::madvise(place, length, MADV_HUGEPAGE);
  return true;
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
