#include "shared_memory/shm_arena.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
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

// Puts the small pages around `memory` into one huge page, where the system does not do so by
// itself for shared files. Needs Linux 6.1 or later. The kernel refuses a range without any page,
// so this writes a byte first.
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

// Tries several times, because collapse() may fail temporarily.
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

// The arena's part in a fork: to parent and child, kCopied allocations behave like ordinary memory.

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
