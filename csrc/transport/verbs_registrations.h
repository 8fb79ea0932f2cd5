// Which memory of users a device may read where it lies. Of the arena: what is sent again and again
// is registered, and stays so while it is allocated. Of others: what somebody keeps, and promises
// to leave where it is.
//
// A registration pins the pages that lie behind its addresses when it is made. Whose memory may be
// unmapped without our hearing of it is therefore not registered; memory of the arena may be, since
// the arena tells (shm_arena.h) before anything else comes to lie at an address.
//
// Threads: acquire() and release() are those of the Transport; any thread may free memory of the
// arena, keep() and lapse() meanwhile. Order of locks: the arena's, then ours.
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

#include "transport/shm_arena.h"
#include "transport/verbs_device.h"

namespace pycoll::transport::verbs {

// A piece that is registered. Known by address while somebody has acquired it.
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
  // While so much more than may be pinned passes through, what is not used is not worth keeping.
  static constexpr std::uint64_t kIdleSweeps = 4;

  // `device` outlives this, and this outlives what is acquired.
  Registrations(const Device& device, const RegistrationLimits& limits);
  ~Registrations() override;
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // The registration that holds all of [data, data + bytes), made now if need be; nullptr where a
  // copy must be sent: memory that is not of the arena, was hardly ever sent, or may not be pinned.
  // What is acquired stays registered until its release(), even if its memory is freed. Requires:
  // bytes <= kSegmentBytesMax.
  [[nodiscard]] Registration* acquire(const std::byte* data, std::size_t bytes);
  void release(Registration* registration);

  // See VerbsTransport. Kept memory counts as pinned, and gives way to nothing.
  [[nodiscard]] bool keep(std::byte* data, std::size_t bytes);
  void lapse(const std::byte* data, std::size_t bytes);

  RegistrationFacts facts() const;

 private:
  using Pieces = std::map<std::uintptr_t, std::unique_ptr<Registration>>;
  using Range = std::pair<std::uintptr_t, std::size_t>;  // its first address, bytes
  struct Extent {
    std::byte* begin;
    std::size_t bytes;
  };
  struct Kept {
    std::unique_ptr<Registration> registration;
    std::uint32_t holders = 0;
  };

  void freed(const std::byte* begin, std::size_t bytes) override;
  [[nodiscard]] Registration* find(std::uintptr_t begin, std::size_t bytes);
  [[nodiscard]] Registration* find_kept(std::uintptr_t begin, std::size_t bytes);
  bool children_have_copies();
  Extent piece_of(const shm::ArenaBlock& block, const std::byte* data) const;
  bool is_worth(const Extent& piece, std::size_t bytes);
  [[nodiscard]] bool make(const Extent& piece);
  [[nodiscard]] bool make_room(std::size_t bytes);
  void note_refusal(std::size_t bytes, int error);
  std::string refusal_of(std::size_t bytes, int error) const;
  Pieces::iterator drop(Pieces::iterator piece);

  const Device& device_;
  shm::Arena& arena_;
  mutable std::mutex mutex_;
  RegistrationLimits limits_;
  Pieces pieces_;  // by their first address
  // How much was copied so far from pieces that are not registered; by their first address.
  std::map<std::uintptr_t, std::size_t> copied_;
  std::map<Range, Kept> kept_;
  std::size_t longest_ = 0;                 // of kept_, in bytes
  std::atomic<std::size_t> kept_count_{0};  // asked for each message
  // Their memory was freed while somebody used them.
  std::vector<std::unique_ptr<Registration>> orphans_;
  std::size_t pinned_ = 0;  // of pieces_ and kept_
  std::uint64_t asked_ = 0;
  std::uint64_t full_until_ = 0;  // so many questions: until then there is no room for more pieces
  std::uint64_t made_ = 0;
  std::string refusal_;
};

}  // namespace pycoll::transport::verbs
