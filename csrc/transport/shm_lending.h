// Payloads that pass between two ranks without a copy, or with one only: the two ends of a link,
// for all its channels.
//
// The lender tells in its control page where the arena of its process is; the borrower maps it when
// it first sees a long payload that was copied, and says so in its ack line; from then on payloads
// from the arena are lent. One that cannot map it says nothing, and gets copies. The other way
// round, a receiver offers a part of its arena, and the sender maps that to put payloads there.
#pragma once

#include "transport/shm_arena.h"
#include "transport/shm_layout.h"

namespace pycoll::transport::shm {

// One thread at a time.
class Lender {
 public:
  // Both outlive the lender.
  Lender(Control* own, const AckLine* peer_acks) : own_(own), peer_acks_(peer_acks) {}

  // Whether the peer can read this memory, and where in the arena it is.
  [[nodiscard]] bool find(const std::byte* data, std::size_t bytes, std::uint64_t* offset) {
    return bytes >= kLentBytesMin && tell(data, bytes, offset) &&
           load_acquire(peer_acks_->arena) == arena_.generation();
  }
  // Whether the peer may map this memory, and where in the arena it is.
  [[nodiscard]] bool tell(const std::byte* data, std::size_t bytes, std::uint64_t* offset) {
    if (!arena_.find(data, bytes, offset)) return false;
    if (own_->lending.generation != arena_.generation()) publish();
    return true;
  }
  std::uint64_t generation() const { return arena_.generation(); }
  // Memory that was told of is not to be allocated again, even once it is freed.
  void keep(const std::byte* data) { arena_.keep(data); }

 private:
  void publish();

  Arena& arena_ = Arena::of_process();
  Control* own_;
  const AckLine* peer_acks_;
};

// One thread at a time.
class Borrower {
 public:
  // The control page and `own_acks` outlive the borrower. `pid`: the process of rank `peer`.
  Borrower(const Control* control, AckLine* own_acks, int peer, int pid)
      : control_(control), own_acks_(own_acks), peer_(peer), pid_(pid) {}

  // Maps the peer's arena if it has another one than before and nothing of that is borrowed.
  void look() {
    if (borrowed_ != 0) return;
    const std::uint64_t generation = load_acquire(control_->lending.generation);
    if (generation != seen_) open(generation);
  }

  // The payload there, to be given back; nullptr if that is not in the arena, as far as mapped.
  [[nodiscard]] const std::byte* borrow(std::uint64_t offset, std::size_t bytes) {
    if (!reaches(offset, bytes)) return nullptr;
    ++borrowed_;
    return arena_.data() + offset;
  }
  void give_back() { --borrowed_; }

  // Memory of the peer's arena, to be written; nullptr if this rank cannot, or the peer has let go.
  [[nodiscard]] std::byte* writable(std::uint64_t generation, std::uint64_t offset,
                                    std::size_t bytes) {
    if (generation != seen_) look();
    if (generation != mapped_ || !writable_ || !intact()) return nullptr;
    return reaches(offset, bytes) ? arena_.data() + offset : nullptr;
  }

  // What was read before the call had not changed: the peer withdraws before it lets go of memory.
  bool intact() const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return load_ordered(control_->lending.withdrawn) == 0;
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
  std::uint64_t borrowed_ = 0;
};

}  // namespace pycoll::transport::shm
