#include "transport/verbs/verbs_registrations.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/bytes.h"

namespace pycoll::transport::verbs {
namespace {

constexpr std::size_t kPage = 4096;
// IBV_FORK_UNNEEDED; the header may be older than the library.
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

// No device reads user memory any more. The arena's notifications end before the members are
// destroyed.
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
  // The arena's lock comes before mutex_. The block stays allocated meanwhile, because the caller
  // sends from it.
  const shm::ArenaBlock block = arena_.block_of(data);
  if (block.begin == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  const Extent piece = piece_of(block, data);
  return is_worth(piece, bytes) && make(piece) ? find(reinterpret_cast<std::uintptr_t>(data), bytes)
                                               : nullptr;
}

// Acquires an existing piece.
Registration* Registrations::find(std::uintptr_t begin, std::size_t bytes) {
  auto after = pieces_.upper_bound(begin);
  if (after == pieces_.begin()) return nullptr;
  Registration& piece = *std::prev(after)->second;
  if (begin - piece.begin_ + bytes > piece.bytes_) return nullptr;
  piece.used_at_ = asked_;
  ++piece.users_;
  return &piece;
}

// Ranges may overlap, so the search checks every range that begins at or before `begin` and is long
// enough to contain it.
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

// Pinned private memory is unsafe across a fork on older kernels. Some kernels hide it from the
// children, which crash when they access it. In others a store of the parent replaces its pages,
// while the device keeps the old pages.
bool Registrations::children_have_copies() {
  const auto fork_state = device_.api().is_fork_initialized;
  if (fork_state != nullptr && fork_state() == kForkUnneeded) return true;
  refusal_ = device_.name() +
             ": arrays are not registered, since children of a fork would lose them; this needs "
             "Linux 5.12 and rdma-core 35";
  return false;
}

// Registers for writing, although devices only read. Otherwise the first store would replace pages
// that were never written or that are shared with a file or another process.
bool Registrations::keep(std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const Range range(reinterpret_cast<std::uintptr_t>(data), bytes);
  if (const auto known = kept_.find(range); known != kept_.end()) {
    ++known->second.holders;
    return true;
  }
  if (!children_have_copies() || !make_space(bytes)) return false;
  errno = 0;
  Owned<ibv_mr> region(device_.api().reg_mr(device_.domain(), data, bytes, IBV_ACCESS_LOCAL_WRITE),
                       device_.api().dereg_mr);
  if (region == nullptr) {
    // This failure does not stop registrations of arena memory, which has smaller pieces.
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

// The piece of the block that contains `data`. Pieces begin at multiples of their size and overlap
// by the length of a segment. So each segment lies in the piece in which it begins.
Registrations::Extent Registrations::piece_of(const shm::ArenaBlock& block,
                                              const std::byte* data) const {
  const auto at = static_cast<std::size_t>(data - block.begin);
  const std::size_t first = at - at % limits_.piece_bytes;
  return {block.begin + first,
          std::min(limits_.piece_bytes + kSegmentBytesMax, round_up(block.bytes - first, kPage))};
}

// Whether enough bytes were copied from a piece that registering it saves time. If not, counts
// `bytes` as copied.
bool Registrations::is_worth(const Extent& piece, std::size_t bytes) {
  std::size_t& copied = copied_[reinterpret_cast<std::uintptr_t>(piece.begin)];
  if (copied >= limits_.copied_bytes) return true;
  copied += bytes;
  return false;
}

bool Registrations::make(const Extent& piece) {
  const auto [begin, bytes] = piece;
  if (!make_space(bytes)) return false;
  errno = 0;
  Owned<ibv_mr> region(device_.api().reg_mr(device_.domain(), begin, bytes, 0),
                       device_.api().dereg_mr);
  if (region == nullptr) {
    note_refusal(bytes, errno);
    return false;
  }
  // libibverbs hides registered memory from children of a fork on kernels where a fork could
  // replace private pages. Arena memory is shared and keeps its pages, and the children use it too.
  (void)::madvise(begin, bytes, MADV_DOFORK);
  pinned_ += bytes;
  ++made_;
  const auto key = reinterpret_cast<std::uintptr_t>(begin);
  copied_.erase(key);
  pieces_[key].reset(new Registration(key, bytes, std::move(region)));
  return true;
}

// Drops pieces that were not used for a long time. Pieces in regular use that do not fit together
// would cost more to register each time than to copy. In that case the function drops nothing, and
// nothing more is registered.
bool Registrations::make_space(std::size_t bytes) {
  if (bytes > limits_.pinned_bytes) return false;
  const std::uint64_t idle = kIdlePolls * limits_.pinned_bytes / kSegmentBytesMax;
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

void Registrations::note_freed(const std::byte* begin, std::size_t bytes) {
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
