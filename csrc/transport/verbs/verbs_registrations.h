// User memory that a device may read in place. Arena memory is registered once it is sent
// repeatedly, and stays registered while it is allocated. Other memory is registered while a caller
// keeps it and promises not to move it.
//
// A registration pins the pages that are behind its addresses when it is made. Memory that may be
// unmapped without notice is therefore not registered. Arena memory may be registered, because the
// arena notifies its watchers (shm_arena.h) before an address is used again.
//
// Threads: acquire() and release() are for the threads of the Transport. Meanwhile any thread may
// free arena memory and call keep() and lapse(). Lock order: the arena's lock, then the lock of
// this class.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shared_memory/shm_arena.h"
#include "transport/verbs/library/verbs_device.h"

namespace pycoll::transport::verbs {

// A registered piece. Its address is stable while it is acquired.
class Registration {
 public:
  std::uint32_t local_key() const { return region_->lkey; }

 private:
  friend class Registrations;
  Registration(std::uintptr_t begin, std::size_t bytes, Owned<ibv_mr> region)
      : begin_(begin), bytes_(bytes), region_(std::move(region)) {}

  std::uintptr_t begin_;
  std::size_t bytes_;
  Owned<ibv_mr> region_;
  std::uint64_t used_at_ = 0;
  std::uint32_t users_ = 0;
};

class Registrations final : private shm::ArenaWatcher {
 public:
  // A piece may be dropped once this many times the bound has been sent without using it.
  static constexpr std::uint64_t kIdlePolls = 4;

  // `device` outlives this object, and this object outlives acquired registrations.
  Registrations(const Device& device, const RegistrationLimits& limits);
  ~Registrations() override;
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // The registration of all of [data, data + bytes), made now if necessary. nullptr if a copy must
  // be sent: the memory is not in the arena, was rarely sent, or may not be pinned. An acquired
  // registration stays until its release(), even if the memory is freed. Requires: bytes <=
  // kSegmentBytesMax.
  [[nodiscard]] Registration* acquire(const std::byte* data, std::size_t bytes);
  void release(Registration* registration);

  // See VerbsTransport. Kept memory counts as pinned and is never dropped to make space.
  [[nodiscard]] bool keep(std::byte* data, std::size_t bytes);
  void lapse(const std::byte* data, std::size_t bytes);

  RegistrationFacts facts() const;

 private:
  using Pieces = std::map<std::uintptr_t, std::unique_ptr<Registration>>;
  using Range = std::pair<std::uintptr_t, std::size_t>;  // first address, bytes
  struct Extent {
    std::byte* begin;
    std::size_t bytes;
  };
  struct Kept {
    std::unique_ptr<Registration> registration;
    std::uint32_t holders = 0;
  };

  void note_freed(const std::byte* begin, std::size_t bytes) override;
  [[nodiscard]] Registration* find(std::uintptr_t begin, std::size_t bytes);
  [[nodiscard]] Registration* find_kept(std::uintptr_t begin, std::size_t bytes);
  bool children_have_copies();
  Extent piece_of(const shm::ArenaBlock& block, const std::byte* data) const;
  bool is_worth(const Extent& piece, std::size_t bytes);
  [[nodiscard]] bool make(const Extent& piece);
  [[nodiscard]] bool make_space(std::size_t bytes);
  void note_refusal(std::size_t bytes, int error);
  std::string refusal_of(std::size_t bytes, int error) const;
  Pieces::iterator drop(Pieces::iterator piece);

  const Device& device_;
  shm::Arena& arena_;
  mutable std::mutex mutex_;
  RegistrationLimits limits_;
  Pieces pieces_;  // by first address
  // Bytes copied so far from pieces that are not registered, by first address.
  std::map<std::uintptr_t, std::size_t> copied_;
  std::map<Range, Kept> kept_;
  std::size_t longest_ = 0;                 // bytes of the longest range in kept_
  std::atomic<std::size_t> kept_count_{0};  // read for each message
  // Registrations whose memory was freed or lapsed while they were acquired.
  std::vector<std::unique_ptr<Registration>> orphans_;
  std::size_t pinned_ = 0;  // bytes in pieces_ and kept_
  std::uint64_t asked_ = 0;
  std::uint64_t full_until_ = 0;  // value of asked_ before which no piece can be added
  std::uint64_t made_ = 0;
  std::string refusal_;
};

}  // namespace pycoll::transport::verbs
