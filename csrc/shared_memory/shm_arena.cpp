#include "shared_memory/shm_arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "base/bytes.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace pycoll::transport::shm {
namespace {

constexpr std::size_t kHugePage = Arena::kAlignment;

std::size_t machine_bytes() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return 0;
  return static_cast<std::size_t>(pages) * static_cast<std::size_t>(page);
}

// The length of the file: twice the memory of the computer, so that fragmentation never matters,
// but at most kMost, so that hundreds of peers can map it. 0 if the file size limit forbids it.
std::size_t file_bytes() {
  constexpr std::size_t kMost = std::size_t{256} << 30;
  const std::size_t bytes = std::min(round_up(2 * machine_bytes(), kHugePage), kMost);
  // Exceeding this limit would kill the process instead of returning an error.
  rlimit limit = {};
  const bool fits = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur >= bytes;
  return fits ? bytes : 0;
}

// Bound on vacant memory that is kept for later allocations. Releasing memory and faulting it in
// again takes longer than reducing it.
std::size_t idle_bytes_max() {
  static const std::size_t bytes =
      std::clamp(machine_bytes() / 64, std::size_t{32} << 20, std::size_t{512} << 20);
  return bytes;
}

// Makes the huge page that contains `memory` one page, even if the system does not do so by itself
// for shared files (Linux 6.1 or later). The kernel refuses a range without any page, so the first
// byte is written before.
void collapse(std::byte* memory) {
  enum : int { kUntried, kWorks, kUnknown };  // kUnknown: the kernel does not know the request
  static std::atomic<int> state{kUntried};
  const int known = state.load(std::memory_order_relaxed);
  if (known == kUnknown) return;
  *memory = std::byte{0};
  std::byte* page = memory - reinterpret_cast<std::uintptr_t>(memory) % kHugePage;
  const bool done = ::madvise(page, kHugePage, MADV_COLLAPSE) == 0;
  if (known == kUntried && (done || errno == EINVAL)) {
    state.store(done ? kWorks : kUnknown, std::memory_order_relaxed);
  }
}

}  // namespace

Arena& Arena::of_process() {
  static const int handlers [[maybe_unused]] = [] {
    process.store(::getpid(), std::memory_order_relaxed);
    return pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  }();
  Arena* arena = current.load(std::memory_order_acquire);
  while (arena == nullptr || arena->pid_ != process.load(std::memory_order_relaxed)) {
    auto* fresh = new Arena;  // a parent's arena stays, because its arrays exist here, too
    fresh->pid_ = process.load(std::memory_order_relaxed);
    fresh->parent_ = arena;
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
      !create_shared_file(bytes, &fd, "pycoll-arrays").ok() ||
      !Mapping::map_bare(fd.get(), bytes, kAlignment, &mapping).ok() ||
      !mapping.cover(kHugePage, true)) {
    return false;
  }
  (void)::madvise(mapping.data(), bytes, MADV_HUGEPAGE);
  std::memcpy(mapping.data(), &key, sizeof(key));
  key_ = key;
  fd_ = std::move(fd);
  mapping_ = std::move(mapping);
  vacant_.reset({kHugePage, bytes - kHugePage});
  used_.assign(bytes / kHugePage, false);
  __atomic_store_n(&generation_, generation_ + 1, __ATOMIC_RELAXED);
  __atomic_store_n(&bytes_, bytes, __ATOMIC_RELAXED);
  __atomic_store_n(&base_, mapping_.data(), __ATOMIC_RELEASE);
  return true;
}

void Arena::close() {
  __atomic_store_n(&base_, nullptr, __ATOMIC_RELEASE);
  mapping_ = {};
  fd_.reset();
  idle_.clear();
}

void Arena::stay(bool stays) {
  const std::lock_guard lock(mutex_);
  stays_ = stays;
  if (stays) return;
  uncache_all();
  if (taken_.empty()) close();
}

std::size_t Arena::prepared_bytes_max() {
  static const std::size_t bytes = machine_bytes() / 8;
  return bytes;
}

// Tries several times, because collapsing a huge page may fail temporarily.
bool Arena::gives_huge_pages() {
  constexpr int kTrials = 3;
  for (int trial = 0; trial < kTrials; ++trial) {
    if (gave_huge_page()) return true;
  }
  return false;
}

// Whether the last small page of a huge page is resident after a write to the first one.
bool Arena::gave_huge_page() {
  std::byte* memory = allocate(kHugePage, InChild::kShared, Content::kAny);
  if (memory == nullptr) return false;
  *memory = std::byte{0};
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  unsigned char resident = 0;
  const bool asked = ::mincore(memory + kHugePage - page, page, &resident) == 0;
  const auto offset = static_cast<std::size_t>(memory - mapping_.data());
  release(memory);
  const std::lock_guard lock(mutex_);
  if (idle_.contains(offset / kHugePage)) release_page(offset / kHugePage);
  return asked && (resident & 1) != 0;
}

std::byte* Arena::allocate(std::size_t bytes, InChild in_child, Content content) {
  std::unique_lock lock(mutex_);
  if (!mapping_.data() && !open()) return nullptr;
  const Taken taken{bytes, in_child, ++numbers_};
  if (bytes > bytes_ || (taken.is_short() && shorts_ == kShortsMax)) return nullptr;
  std::size_t offset = 0;
  if (!reuse(taken, &offset)) {
    if (!take(length_of(bytes), &offset)) return nullptr;
    taken_.emplace(offset, taken);
  }
  shorts_ += taken.is_short();
  prepare(lock, offset, bytes, content);
  return mapping_.data() + offset;
}

// The bytes that an allocation occupies.
std::size_t Arena::length_of(std::size_t bytes) {
  static const std::size_t granule =
      std::max(kGranule, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
  return round_up(bytes, granule);
}

void Arena::prepare(std::unique_lock<std::mutex>& lock, std::size_t offset, std::size_t bytes,
                    Content content) {
  std::byte* memory = mapping_.data() + offset;
  const bool prepared = bytes <= prepared_bytes_max();
  std::size_t part = 0;
  for (std::size_t at = offset; at < offset + bytes; at += part) {
    part = std::min(offset + bytes, round_up(at + 1, kHugePage)) - at;
    const bool fresh = !used_[at / kHugePage];
    used_[at / kHugePage] = true;
    if (!fresh && content == Content::kAny) continue;
    // Other threads may allocate while the lock is free; this block is already allocated.
    lock.unlock();
    if (fresh && prepared) collapse(memory + (at - offset));
    if (!fresh) std::memset(memory + (at - offset), 0, part);
    lock.lock();
  }
}

bool Arena::take(std::size_t length, std::size_t* offset) {
  const std::size_t alignment = length >= kHugePage ? kHugePage : length_of(1);
  if (!vacant_.take(length, alignment, offset)) return false;
  const std::size_t end = *offset + length;
  if (!mapping_.cover(end, true)) {
    (void)vacant_.give({*offset, length});
    return false;
  }
  idle_.erase(idle_.lower_bound(*offset / kHugePage), idle_.lower_bound(div_ceil(end, kHugePage)));
  return true;
}

// Takes the newest cached block of the same length, because it may still be in the processor cache.
bool Arena::reuse(const Taken& taken, std::size_t* offset) {
  const auto fits = [length = length_of(taken.bytes)](Blocks::iterator block) {
    return length_of(block->second.bytes) == length;
  };
  const auto found = std::find_if(cached_.rbegin(), cached_.rend(), fits);
  if (found == cached_.rend()) return false;
  *offset = (*found)->first;
  (*found)->second = taken;
  cached_.erase(std::prev(found.base()));
  return true;
}

// Caches a freed block instead of vacating it, because programs free and allocate the same few
// lengths repeatedly. False if the block is too long or the arena may close.
bool Arena::cache(Blocks::iterator block) {
  constexpr std::size_t kBytesMax = std::size_t{256} << 10, kBlocksMax = 32;
  if (!stays_ || block->second.bytes > kBytesMax) return false;
  if (cached_.size() == kBlocksMax) {
    uncache(cached_.front());
    cached_.erase(cached_.begin());
  }
  block->second = Taken{block->second.bytes, block->second.in_child, 0};
  block->second.cached = true;
  cached_.push_back(block);
  return true;
}

void Arena::uncache(Blocks::iterator block) {
  vacate(block->first, length_of(block->second.bytes));
  taken_.erase(block);
}

void Arena::uncache_all() {
  for (const Blocks::iterator block : cached_) uncache(block);
  cached_.clear();
}

void Arena::free(std::byte* memory) { of_process().release(memory); }

void Arena::release(std::byte* memory) {
  std::unique_lock lock(mutex_);
  const auto found = locate(memory);
  if (found == taken_.end()) {
    lock.unlock();
    if (parent_ != nullptr) parent_->forget(memory);
    return;
  }
  const auto& [offset, taken] = *found;
  const std::size_t length = length_of(taken.bytes);
  for (ArenaWatcher* watcher : watchers_) watcher->note_freed(memory, taken.bytes);
  if (taken.detached && !reattach(offset, length)) return;
  if (taken.kept) return punch(offset, length);  // the block stays allocated, and the file open
  shorts_ -= taken.is_short();
  if (cache(found)) return;
  vacate(offset, length);
  taken_.erase(found);
  if (taken_.empty() && !stays_) close();
}

// Makes a block vacant. Empty huge pages stay in memory for later allocations. If there are too
// many, the last ones are released, because allocations prefer the first of equal holes.
void Arena::vacate(std::size_t offset, std::size_t length) {
  const std::size_t first = offset / kHugePage;
  const std::size_t last = (offset + length - 1) / kHugePage;
  const Hole hole = vacant_.give({offset, length});
  for (std::size_t page = first; page <= last; ++page) {
    const bool empty =
        page * kHugePage >= hole.offset && (page + 1) * kHugePage <= hole.offset + hole.length;
    if (empty && used_[page]) idle_.insert(page);
  }
  while (idle_.size() * kHugePage > idle_bytes_max()) release_page(*idle_.rbegin());
}

void Arena::release_page(std::size_t page) {
  idle_.erase(page);
  used_[page] = false;
  punch(page * kHugePage, kHugePage);
}

// Releases the memory; the addresses then read as zeros.
void Arena::punch(std::size_t offset, std::size_t length) const {
  (void)::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(length));
}

bool Arena::find(const std::byte* data, std::size_t bytes, std::uint64_t* offset) const {
  const std::byte* base = __atomic_load_n(&base_, __ATOMIC_ACQUIRE);
  if (base == nullptr || data < base) return false;
  const std::uint64_t all = __atomic_load_n(&bytes_, __ATOMIC_RELAXED);
  *offset = static_cast<std::uint64_t>(data - base);
  return *offset < all && bytes <= all - *offset && !is_detached(data);
}

bool Arena::owns(const std::byte* data) {
  const Arena* arena = current.load(std::memory_order_acquire);
  for (; arena != nullptr; arena = arena->parent_) {
    const std::byte* base = __atomic_load_n(&arena->base_, __ATOMIC_ACQUIRE);
    const std::uint64_t all = __atomic_load_n(&arena->bytes_, __ATOMIC_RELAXED);
    if (base != nullptr && data >= base && data < base + all) return true;
  }
  return false;
}

std::uint64_t Arena::generation() const { return __atomic_load_n(&generation_, __ATOMIC_RELAXED); }

ArenaBlock Arena::block_of(const std::byte* data) {
  std::unique_lock lock(mutex_);
  const auto found = locate(data);
  if (found != taken_.end()) return {mapping_.data() + found->first, found->second.bytes};
  lock.unlock();
  return parent_ != nullptr ? parent_->block_of(data) : ArenaBlock{};
}

Arena::Blocks::iterator Arena::locate(const std::byte* data) {
  std::byte* base = mapping_.data();
  if (base == nullptr || data < base || data >= base + bytes_) return taken_.end();
  const auto offset = static_cast<std::size_t>(data - base);
  auto found = taken_.upper_bound(offset);
  if (found == taken_.begin()) return taken_.end();
  --found;
  const bool inside = offset - found->first < found->second.bytes;
  return inside && !found->second.cached ? found : taken_.end();
}

void Arena::keep(const std::byte* data) {
  const std::lock_guard lock(mutex_);
  const auto found = locate(data);
  if (found == taken_.end()) return;
  found->second.kept = true;
  if (found->second.in_child == InChild::kCopied) (void)detach(found->first, found->second);
}

// Writes the content to a shared mapping of the file, which then replaces the private memory.
bool Arena::bring_back(const std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = locate(data);
  if (found == taken_.end() || mapping_.data() + found->first != data) return false;
  auto& [offset, taken] = *found;
  const std::size_t length = length_of(bytes);
  Mapping shared;
  if (taken.bytes != bytes || !taken.detached || taken.kept ||
      !Mapping::map(fd_.get(), offset, length, true, &shared, kAlignment).ok()) {
    return false;
  }
  if (bytes >= kHugePage && bytes <= prepared_bytes_max()) {
    for (std::size_t at = 0; at < bytes; at += kHugePage) collapse(shared.data() + at);
  }
  std::memcpy(shared.data(), data, bytes);
  if (!reattach(offset, length)) return false;
  taken.detached = false;
  return true;
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
