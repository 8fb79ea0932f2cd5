// Payloads that pass between two ranks without a copy (zero-copy read) or with one copy (direct
// write). One object per link end serves all channels of the link.
//
// The owner of exposed memory publishes the location of its process's arena in its control page.
// The peer maps that arena when it first receives a long payload that was copied, and reports the
// mapping in its ack line. From then on the owner exposes payloads that lie in the arena. A peer
// that cannot map the arena reports nothing and receives copies.
//
// A receiver offers a part of its arena as a write window, and the sender maps that arena to write
// payloads there.
#pragma once

#include "shared_memory/shm_arena.h"
#include "transport/capabilities.h"
#include "transport/shm/shm_layout.h"

namespace pycoll::transport::shm {

// This rank's own arena, as the peer may see it. One thread at a time.
class ZeroCopySource {
 public:
  // Both outlive this object.
  ZeroCopySource(Control* own, const AckLine* peer_acks) : own_(own), peer_acks_(peer_acks) {}

  // Whether the peer can read this memory now. Sets `offset` to its place in the arena.
  [[nodiscard]] bool find(const std::byte* data, std::size_t bytes, std::uint64_t* offset) {
    return bytes >= kUncopiedBytesMin && tell(data, bytes, offset) &&
           load_acquire(peer_acks_->arena) == arena_.generation();
  }
  // Whether this memory is in the arena. Sets `offset` to its place and publishes the arena.
  [[nodiscard]] bool tell(const std::byte* data, std::size_t bytes, std::uint64_t* offset) {
    if (!arena_.find(data, bytes, offset)) return false;
    if (own_->zero_copy.generation != arena_.generation()) publish();
    return true;
  }
  std::uint64_t generation() const { return arena_.generation(); }
  // Prevents memory that the peer knows from being allocated again, even once it is freed.
  void keep(const std::byte* data) { arena_.keep(data); }

 private:
  void publish();

  Arena& arena_ = Arena::of_process();
  Control* own_;
  const AckLine* peer_acks_;
};

// The arena of the peer's process, mapped by this rank. One thread at a time.
class PeerArena {
 public:
  // The control page and `own_acks` outlive this object. `pid`: the process of rank `peer`.
  PeerArena(const Control* control, AckLine* own_acks, int peer, int pid)
      : control_(control), own_acks_(own_acks), peer_(peer), pid_(pid) {}

  // Maps the peer's arena if the peer has a new one and nothing of the old one is in use.
  void refresh() {
    if (acquired_ != 0) return;
    const std::uint64_t generation = load_acquire(control_->zero_copy.generation);
    if (generation != seen_) open(generation);
  }

  // The exposed payload, in use until release(). nullptr if it lies outside the mapped arena.
  [[nodiscard]] const std::byte* acquire(std::uint64_t offset, std::size_t bytes) {
    if (!reaches(offset, bytes)) return nullptr;
    ++acquired_;
    return arena_.data() + offset;
  }
  // Ends the use of one payload.
  void release() { --acquired_; }

  // The address of a write window in the peer's arena. nullptr if this rank cannot write there, or
  // if the peer has withdrawn its memory.
  [[nodiscard]] std::byte* writable(std::uint64_t generation, std::uint64_t offset,
                                    std::size_t bytes) {
    if (generation != seen_) refresh();
    if (generation != mapped_ || !writable_ || !intact()) return nullptr;
    return reaches(offset, bytes) ? arena_.data() + offset : nullptr;
  }

  // Whether everything that was read before this call was unchanged. The peer sets `withdrawn`
  // before it changes or frees exposed memory.
  bool intact() const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return load_ordered(control_->zero_copy.withdrawn) == 0;
  }

 private:
  [[nodiscard]] bool reaches(std::uint64_t offset, std::size_t bytes) {
    return arena_.data() != nullptr && offset <= bytes_ && bytes <= bytes_ - offset &&
           arena_.cover(offset + bytes, writable_);
  }
  void open(std::uint64_t generation);
  [[nodiscard]] bool map(int file, bool writable);

  const Control* control_;
  AckLine* own_acks_;
  int peer_;
  int pid_;
  Mapping arena_;
  std::uint64_t bytes_ = 0;
  std::uint64_t seen_ = 0;
  std::uint64_t mapped_ = 0;  // generation; 0: none
  bool writable_ = false;
  std::uint64_t acquired_ = 0;
};

}  // namespace pycoll::transport::shm
