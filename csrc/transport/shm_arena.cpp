#include "transport/shm_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "base/bytes.h"

namespace pycoll::transport::shm {
namespace {

// Twice the machine's memory, so that holes between arrays never matter. 0: it may not be so long.
std::size_t file_bytes() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return 0;
  const std::size_t bytes = round_up(
      2 * static_cast<std::size_t>(pages) * static_cast<std::size_t>(page), Arena::kAlignment);
  // To exceed this limit would not fail but kill.
  rlimit limit = {};
  const bool fits = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur >= bytes;
  return fits ? bytes : 0;
}

}  // namespace

Arena& Arena::of_process() {
  static std::atomic<Arena*> current{nullptr};
  Arena* arena = current.load(std::memory_order_acquire);
  while (arena == nullptr || arena->pid_ != ::getpid()) {
    auto* fresh = new Arena;  // a parent's stays: its arrays are here too
    fresh->pid_ = ::getpid();
    if (current.compare_exchange_strong(arena, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *arena;
}

bool Arena::open() {
  const std::size_t bytes = file_bytes();
  UniqueFd fd;
  Mapping mapping;
  std::uint64_t key = 0;
  if (bytes == 0 || ::getrandom(&key, sizeof(key), 0) != sizeof(key) ||
      !create_segment(bytes, &fd).ok() ||
      !Mapping::map(fd.get(), 0, bytes, true, &mapping, kAlignment).ok()) {
    return false;
  }
  (void)::madvise(mapping.data(), bytes, MADV_HUGEPAGE);
  std::memcpy(mapping.data(), &key, sizeof(key));
  key_ = key;
  fd_ = std::move(fd);
  mapping_ = std::move(mapping);
  vacant_ = {{kAlignment, bytes - kAlignment}};
  __atomic_store_n(&generation_, generation_ + 1, __ATOMIC_RELAXED);
  __atomic_store_n(&bytes_, bytes, __ATOMIC_RELAXED);
  __atomic_store_n(&base_, mapping_.data(), __ATOMIC_RELEASE);
  return true;
}

std::byte* Arena::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!mapping_.data() && !open()) return nullptr;
  if (bytes > bytes_) return nullptr;
  const std::size_t length = round_up(bytes, kAlignment);
  const auto hole = std::find_if(vacant_.begin(), vacant_.end(),
                                 [length](const auto& one) { return one.second >= length; });
  if (hole == vacant_.end()) return nullptr;
  const auto [offset, room] = *hole;
  vacant_.erase(hole);
  if (room > length) vacant_.emplace(offset + length, room - length);
  taken_.emplace(offset, bytes);
  return mapping_.data() + offset;
}

void Arena::free(std::byte* memory) { of_process().release(memory); }

// What is not found is a parent's.
void Arena::release(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  std::byte* base = mapping_.data();
  if (base == nullptr || memory < base || memory >= base + bytes_) return;
  const auto found = taken_.find(static_cast<std::size_t>(memory - base));
  if (found == taken_.end()) return;
  const auto [offset, bytes] = *found;
  const std::size_t length = round_up(bytes, kAlignment);
  for (ArenaWatcher* watcher : watchers_) watcher->freed(memory, bytes);
  if (kept_.contains(offset)) return;  // stays taken, and the file with it
  taken_.erase(found);
  if (taken_.empty()) {
    __atomic_store_n(&base_, nullptr, __ATOMIC_RELEASE);
    mapping_ = {};
    fd_.reset();
    return;
  }
  // The pages go back; what is allocated here next reads as zeros again.
  (void)::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(length));
  vacate(offset, length);
}

// Joined with the holes on both sides.
void Arena::vacate(std::size_t offset, std::size_t length) {
  auto next = vacant_.lower_bound(offset);
  if (next != vacant_.end() && offset + length == next->first) {
    length += next->second;
    next = vacant_.erase(next);
  }
  if (next != vacant_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += length;
      return;
    }
  }
  vacant_.emplace(offset, length);
}

bool Arena::find(const std::byte* data, std::size_t bytes, std::uint64_t* offset) const {
  const std::byte* base = __atomic_load_n(&base_, __ATOMIC_ACQUIRE);
  if (base == nullptr || data < base) return false;
  const std::uint64_t all = __atomic_load_n(&bytes_, __ATOMIC_RELAXED);
  *offset = static_cast<std::uint64_t>(data - base);
  return *offset < all && bytes <= all - *offset;
}

std::uint64_t Arena::generation() const { return __atomic_load_n(&generation_, __ATOMIC_RELAXED); }

ArenaBlock Arena::block_of(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  return locate(data);
}

ArenaBlock Arena::locate(const std::byte* data) const {
  std::byte* base = mapping_.data();
  if (base == nullptr || data < base) return {};
  const auto offset = static_cast<std::size_t>(data - base);
  auto found = taken_.upper_bound(offset);
  if (found == taken_.begin()) return {};
  --found;
  if (offset - found->first >= found->second) return {};
  return {base + found->first, found->second};
}

void Arena::keep(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  const ArenaBlock block = locate(data);
  if (block.begin != nullptr) kept_.insert(static_cast<std::size_t>(block.begin - mapping_.data()));
}

void Arena::watch(ArenaWatcher& watcher) {
  const std::lock_guard lock(mutex_);
  watchers_.push_back(&watcher);
}

void Arena::unwatch(ArenaWatcher& watcher) {
  const std::lock_guard lock(mutex_);
  std::erase(watchers_, &watcher);
}

ArenaFile Arena::file() {
  const std::lock_guard lock(mutex_);
  if (mapping_.data() == nullptr) return {};
  return {generation_, bytes_, key_, fd_.get()};
}

}  // namespace pycoll::transport::shm
