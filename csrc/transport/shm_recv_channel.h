// The receiving end of a shared-memory channel. All in line: no call here enters the kernel unless
// the peer sleeps.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/shm_wiring.h"

namespace pycoll::transport::shm {

// The first header from the peer that cannot be. Set by a channel, judged by its link.
struct Fault {
  bool found = false;
  std::uint32_t claimed_bytes = 0;
  std::uint64_t claimed_offset = 0;  // of the payload, where bytes are possible
};

class alignas(64) ShmRecvChannel final : public RecvChannel {
 public:
  // Once there is a fault, no channel of the link receives any more; `fault` outlives the channel.
  // `lines` are the channel's part of the peer's `segment`.
  ShmRecvChannel(std::uint32_t number, Whole<const std::byte> segment, const SlotLine* lines,
                 const Wiring& wiring, Fault* fault)
      : lines_(lines),
        released_(&wiring.own_acks->released[number]),
        bell_(wiring.bell),
        fault_(fault),
        segment_(segment),
        peer_starved_(&wiring.peer_acks->starved),
        starved_bit_(std::uint64_t{1} << number),
        lender_(wiring.lender),
        borrower_(wiring.borrower),
        offer_(&wiring.own_acks->offers[number]),
        own_core_(wiring.own_core) {}

  const Segment* peek() override {
    if (peeked_) return &arrived_;
    const SlotLine& line = lines_[head_ % kChannelDepth];
    if (load_acquire(line.stamp) != head_ + 1 || fault_->found) return nullptr;
    return take(line);
  }

  bool intact() override { return !arrived_.lent || borrower_->intact(); }

  // The peer may read meanwhile: it looks at `sequence` in front and behind.
  void offer(const Offer& offer) override {
    std::uint64_t offset = 0;
    const bool offers = offer.uses != 0 && lender_->tell(offer.memory, offer.bytes, &offset);
    store_release(offer_->sequence, 0);
    store_release(offer_->uses, offers ? offer.uses : 0);
    if (offers) {
      store_release(offer_->agreement, offer.agreement);
      store_release(offer_->generation, lender_->generation());
      store_release(offer_->offset, offset);
      store_release(offer_->bytes, offer.bytes);
      offered_ = offer.memory;
    }
    bell_->publish(offer_->sequence, offer.sequence);  // the peer may be waiting for it
  }
  // Sees to it that what was offered last goes to nobody else.
  void keep_offered() {
    if (offered_ != nullptr) lender_->keep(offered_);
  }

  void release() override {
    PYCOLL_ASSERT(peeked_, "release of segment %llu before peek",
                  static_cast<unsigned long long>(head_));
    peeked_ = false;
    if (own_core_ != nullptr && arrived_.header.bytes >= kStreamedBytesMin) {
      tell_core(own_core_, sched_getcpu());
    }
    if (std::exchange(arrived_.lent, false)) borrower_->give_back();
    bell_->publish_if_wanted(*released_, ++head_, *peer_starved_, starved_bit_);
    // Where ranks share cores the next has hardly come yet.
    if (own_core_ == nullptr) fetch_ahead();
  }

  // True once for a segment that has arrived and was not peeked at yet.
  bool has_news() {
    if (peeked_ || told_ == head_ + 1) return false;
    if (load_ordered(lines_[head_ % kChannelDepth].stamp) != head_ + 1) return false;
    told_ = head_ + 1;
    return true;
  }

 private:
  // Copies the header before looking at it, since the peer could still change the original.
  [[nodiscard]] const Segment* take(const SlotLine& line) {
    std::memcpy(&arrived_.header, &line.header, sizeof(arrived_.header));
    const std::uint32_t bytes = arrived_.header.bytes;
    std::uint64_t offset = 0;
    if (bytes > kInlineBytes) std::memcpy(&offset, line.payload, sizeof(offset));
    arrived_.placed = offset == kPlacedBit && offered_ != nullptr && bytes <= kSegmentBytesMax;
    const std::byte* data = bytes <= kSegmentBytesMax ? find(line, bytes, offset) : nullptr;
    if (data == nullptr && !arrived_.placed) {
      *fault_ = {true, bytes, offset & ~kLentBit};
      return nullptr;
    }
    arrived_.data = bytes == 0 ? nullptr : data;
    arrived_.lent = (offset & kLentBit) != 0;
    told_ = head_ + 1;
    peeked_ = true;
    // If the next has come already, its line is here when this segment has been combined; else the
    // line stays as it is.
    __builtin_prefetch(&lines_[(head_ + 1) % kChannelDepth]);
    return &arrived_;
  }

  // The beginning of the next payload, if it has come already: 64 calls of 1 KiB that were started
  // together took 0.92 of their time. Not before it has: its lines would be taken from the peer,
  // which is writing them.
  void fetch_ahead() const {
    constexpr std::uint64_t kLine = 64, kAhead = 1024;
    const SlotLine& line = lines_[head_ % kChannelDepth];
    if (load_acquire(line.stamp) != head_ + 1 || line.header.bytes <= kInlineBytes) return;
    std::uint64_t offset = 0;
    std::memcpy(&offset, line.payload, sizeof(offset));
    if (offset > segment_.bytes) return;  // it lies elsewhere
    const std::uint64_t bytes = std::min<std::uint64_t>(line.header.bytes, segment_.bytes - offset);
    for (std::uint64_t at = 0; at < std::min(bytes, kAhead); at += kLine) {
      __builtin_prefetch(segment_.base + offset + at);
    }
  }

  // Where the payload lies; nullptr if that is nowhere.
  [[nodiscard]] const std::byte* find(const SlotLine& line, std::uint32_t bytes,
                                      std::uint64_t offset) {
    if (bytes <= kInlineBytes) return line.payload;
    if ((offset & kLentBit) != 0) return borrower_->borrow(offset & ~kLentBit, bytes);
    if (bytes >= kLentBytesMin) borrower_->look();
    return offset <= segment_.bytes - bytes ? segment_.base + offset : nullptr;
  }

  // One line for all but the segment itself, see ShmSendChannel.
  const SlotLine* lines_;
  std::uint64_t* released_;
  Bell* bell_;
  Fault* fault_;
  std::uint64_t head_ = 0;  // segments released
  std::uint64_t told_ = 0;  // segments that the owner of this end knows of
  bool peeked_ = false;
  Segment arrived_;

  Whole<const std::byte> segment_;
  const std::uint64_t* peer_starved_;
  std::uint64_t starved_bit_;
  Lender* lender_;
  Borrower* borrower_;
  OfferLine* offer_;
  const std::byte* offered_ = nullptr;  // last
  std::uint64_t* own_core_;
};

}  // namespace pycoll::transport::shm
