#include "transport/verbs_registrations.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/bytes.h"

namespace pycoll::transport::verbs {
namespace {

constexpr std::size_t kPage = 4096;
// IBV_FORK_UNNEEDED; headers may be older than the library.
constexpr int kForkUnneeded = 2;

}  // namespace

RegistrationLimits RegistrationLimits::of_machine() {
  RegistrationLimits limits;
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return limits;
  limits.pinned_bytes = static_cast<std::size_t>(pages) * static_cast<std::size_t>(page) / 4;
  return limits;
}

Registrations::Registrations(const Device& device, const RegistrationLimits& limits)
    : device_(device), arena_(shm::Arena::of_process()), limits_(limits) {
  arena_.watch(*this);
}

// Nobody reads through them any more; first of all nobody may tell of them.
Registrations::~Registrations() { arena_.unwatch(*this); }

Registration* Registrations::acquire(const std::byte* data, std::size_t bytes) {
  std::uint64_t offset = 0;
  if (!arena_.find(data, bytes, &offset)) {
    if (kept_count_.load(std::memory_order_relaxed) == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    return find_kept(reinterpret_cast<std::uintptr_t>(data), bytes);
  }
  {
    const std::lock_guard lock(mutex_);
    ++asked_;
    if (Registration* found = find(reinterpret_cast<std::uintptr_t>(data), bytes)) return found;
    if (asked_ < full_until_ || limits_.pinned_bytes == 0) return nullptr;
  }
  // The arena's lock comes before ours. That the block stays meanwhile is the caller's promise: it
  // sends from there.
  const shm::ArenaBlock block = arena_.block_of(data);
  if (block.begin == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  const Extent piece = piece_of(block, data);
  return is_worth(piece, bytes) && make(piece) ? find(reinterpret_cast<std::uintptr_t>(data), bytes)
                                               : nullptr;
}

// Acquires what is there.
Registration* Registrations::find(std::uintptr_t begin, std::size_t bytes) {
  auto after = pieces_.upper_bound(begin);
  if (after == pieces_.begin()) return nullptr;
  Registration& piece = *std::prev(after)->second;
  if (begin - piece.begin_ + bytes > piece.bytes_) return nullptr;
  piece.used_at_ = asked_;
  ++piece.users_;
  return &piece;
}

// Ranges may overlap: every one that begins before and could reach so far is looked at.
Registration* Registrations::find_kept(std::uintptr_t begin, std::size_t bytes) {
  auto after = kept_.upper_bound(Range(begin, SIZE_MAX));
  while (after != kept_.begin()) {
    --after;
    const std::size_t offset = begin - after->first.first;
    if (offset >= longest_) return nullptr;
    if (offset + bytes > after->first.second) continue;
    Registration& found = *after->second.registration;
    ++found.users_;
    return &found;
  }
  return nullptr;
}

// Private memory that is pinned is either hidden from children of a fork, which then die where they
// touch it, or, on older kernels and if it is not hidden, changes its pages under the device.
bool Registrations::children_have_copies() {
  const auto told = device_.api().is_fork_initialized;
  if (told != nullptr && told() == kForkUnneeded) return true;
  refusal_ = device_.name() +
             ": arrays are not registered, since children of a fork would lose them; that takes "
             "Linux 5.12 and rdma-core 35";
  return false;
}

// Registered for writing, though devices only read: pages that were never written, or are shared
// with a file or another process until then, would otherwise be replaced by the first store.
bool Registrations::keep(std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const Range range(reinterpret_cast<std::uintptr_t>(data), bytes);
  if (const auto known = kept_.find(range); known != kept_.end()) {
    ++known->second.holders;
    return true;
  }
  if (!children_have_copies() || !make_room(bytes)) return false;
  errno = 0;
  Owned<ibv_mr> region(device_.api().reg_mr(device_.domain(), data, bytes, IBV_ACCESS_LOCAL_WRITE),
                       device_.api().dereg_mr);
  if (region == nullptr) {
    // It says nothing about the arena's memory, of which less is asked at a time.
    refusal_ = refusal_of(bytes, errno);
    return false;
  }
  pinned_ += bytes;
  ++made_;
  Kept& kept = kept_[range];
  kept.registration.reset(new Registration(range.first, bytes, std::move(region)));
  kept.holders = 1;
  longest_ = std::max(longest_, bytes);
  kept_count_.store(kept_.size(), std::memory_order_relaxed);
  return true;
}

void Registrations::lapse(const std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto kept = kept_.find(Range(reinterpret_cast<std::uintptr_t>(data), bytes));
  if (kept == kept_.end() || --kept->second.holders != 0) return;
  pinned_ -= bytes;
  if (kept->second.registration->users_ != 0) {
    orphans_.push_back(std::move(kept->second.registration));
  }
  kept_.erase(kept);
  kept_count_.store(kept_.size(), std::memory_order_relaxed);
  longest_ = 0;
  for (const auto& [range, unused] : kept_) longest_ = std::max(longest_, range.second);
  full_until_ = 0;
}

void Registrations::release(Registration* registration) {
  const std::lock_guard lock(mutex_);
  if (--registration->users_ != 0) return;
  std::erase_if(orphans_, [&](const auto& orphan) { return orphan.get() == registration; });
}

// The piece of the block that `data` lies in. Pieces begin at multiples of their size and overlap
// by what a segment may be long, so that a segment lies whole in the one where it begins.
Registrations::Extent Registrations::piece_of(const shm::ArenaBlock& block,
                                              const std::byte* data) const {
  const auto at = static_cast<std::size_t>(data - block.begin);
  const std::size_t first = at - at % limits_.piece_bytes;
  return {block.begin + first,
          std::min(limits_.piece_bytes + kSegmentBytesMax, round_up(block.bytes - first, kPage))};
}

// Whether a piece has been sent from so often that not to copy these bytes, and more later, pays.
bool Registrations::is_worth(const Extent& piece, std::size_t bytes) {
  std::size_t& copied = copied_[reinterpret_cast<std::uintptr_t>(piece.begin)];
  if (copied >= limits_.copied_bytes) return true;
  copied += bytes;
  return false;
}

bool Registrations::make(const Extent& piece) {
  const auto [begin, bytes] = piece;
  if (!make_room(bytes)) return false;
  errno = 0;
  Owned<ibv_mr> region(device_.api().reg_mr(device_.domain(), begin, bytes, 0),
                       device_.api().dereg_mr);
  if (region == nullptr) {
    note_refusal(bytes, errno);
    return false;
  }
  // libibverbs takes what is registered from children of a fork, on kernels where private memory
  // would otherwise change places. This memory is shared, stays where it is, and is theirs too.
  (void)::madvise(begin, bytes, MADV_DOFORK);
  pinned_ += bytes;
  ++made_;
  const auto key = reinterpret_cast<std::uintptr_t>(begin);
  copied_.erase(key);
  pieces_[key].reset(new Registration(key, bytes, std::move(region)));
  return true;
}

// Drops what was not used for long. What is used again and again but does not fit would cost more
// to register each time than to copy: then nothing is dropped, and nothing more is registered.
bool Registrations::make_room(std::size_t bytes) {
  if (bytes > limits_.pinned_bytes) return false;
  const std::uint64_t idle = kIdleSweeps * limits_.pinned_bytes / kSegmentBytesMax;
  while (pinned_ + bytes > limits_.pinned_bytes) {
    if (pieces_.empty()) return false;
    const auto oldest = std::min_element(
        pieces_.begin(), pieces_.end(),
        [](const auto& a, const auto& b) { return a.second->used_at_ < b.second->used_at_; });
    const Registration& victim = *oldest->second;
    full_until_ = victim.users_ != 0 ? asked_ + idle : victim.used_at_ + idle;
    if (asked_ < full_until_) return false;
    (void)drop(oldest);
  }
  return true;
}

Registrations::Pieces::iterator Registrations::drop(Pieces::iterator piece) {
  pinned_ -= piece->second->bytes_;
  if (piece->second->users_ != 0) orphans_.push_back(std::move(piece->second));
  return pieces_.erase(piece);
}

void Registrations::note_refusal(std::size_t bytes, int error) {
  const bool memory = error == ENOMEM || error == EAGAIN || error == EPERM;
  limits_.pinned_bytes = memory ? pinned_ : 0;
  refusal_ = refusal_of(bytes, error);
}

std::string Registrations::refusal_of(std::size_t bytes, int error) const {
  return device_
      .refused("cannot register " + std::to_string(bytes / 1024) + " KiB of an array", error)
      .message();
}

void Registrations::freed(const std::byte* begin, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  auto piece = pieces_.lower_bound(first);
  while (piece != pieces_.end() && piece->first - first < bytes) piece = drop(piece);
  copied_.erase(copied_.lower_bound(first), copied_.lower_bound(first + bytes));
  full_until_ = 0;
}

RegistrationFacts Registrations::facts() const {
  const std::lock_guard lock(mutex_);
  return {pinned_, pieces_.size() + kept_.size(), made_, refusal_};
}

}  // namespace pycoll::transport::verbs
