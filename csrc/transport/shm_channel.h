// The two ends of a shared-memory channel, and the bell that wakes a sleeping peer. All in line: no
// call here enters the kernel unless the peer sleeps.
#pragma once

#include <unistd.h>

#include <atomic>

#include "base/assert.h"
#include "transport/shm_layout.h"

namespace pycoll::transport::shm {

// Publishes words to one peer and wakes it if it sleeps.
//
// A sleeper first marks its epoch odd and then looks for news; a publisher first stores the news
// and then looks at the epoch. One of the two must see the other's store, which needs a full
// barrier on both sides. A sleeper that barriers_when_arming makes the kernel run one on every
// processor, so that the publisher, far more frequent, pays nothing; otherwise the publisher's
// store is the barrier.
class Bell {
 public:
  // `peer_sleep` outlives the bell; `doorbell` stays the caller's. `fenced`: see above.
  Bell(const Sleep* peer_sleep, int doorbell, bool fenced)
      : peer_sleep_(peer_sleep), doorbell_(doorbell), fenced_(fenced) {}

  void publish(std::uint64_t& word, std::uint64_t value) {
    store(word, value);
    ring();
  }

  // For news that concerns the peer only if `wanted` has one of `bits`; it sets them before it
  // sleeps.
  void publish_if_wanted(std::uint64_t& word, std::uint64_t value, const std::uint64_t& wanted,
                         std::uint64_t bits) {
    store(word, value);
    const std::uint64_t epoch = load_ordered(peer_sleep_->epoch);
    if (__builtin_expect((epoch & 1) != 0, 0) && (load_acquire(wanted) & bits) != 0) wake(epoch);
  }

  // Wakes the peer for what was published before by store_ordered.
  void ring() {
    const std::uint64_t epoch = load_ordered(peer_sleep_->epoch);
    if (__builtin_expect((epoch & 1) != 0, 0)) wake(epoch);
  }

 private:
  void store(std::uint64_t& word, std::uint64_t value) const {
    if (fenced_) {
      store_ordered(word, value);  // pairs with store_ordered(epoch) in ShmTransport::arm
    } else {
      store_release(word, value);
      std::atomic_signal_fence(std::memory_order_seq_cst);  // pairs with membarrier in arm
    }
  }

  // Once per sleep: the doorbell stays readable until the sleeper is up again.
  void wake(std::uint64_t epoch) {
    if (epoch == woken_epoch_) return;
    woken_epoch_ = epoch;
    const std::uint64_t one = 1;
    // Fails only if the counter is full, and then the doorbell is readable anyway.
    (void)!::write(doorbell_, &one, sizeof(one));
  }

  const Sleep* peer_sleep_;
  std::uint64_t woken_epoch_ = 0;
  int doorbell_;
  bool fenced_;
};

// Where one channel's slots lie: this rank's own when it sends, the peer's when it receives.
template <typename Line, typename Byte>
struct Slots {
  Line* lines;
  Byte* payloads;
};

// What a channel stands on besides its slots; all of it outlives the channel.
struct Wiring {
  AckLine* own_acks;
  const AckLine* peer_acks;
  Bell* bell;      // wakes the peer
  Bell* own_bell;  // wakes this rank itself, if it is armed
};

class ShmSendChannel final : public SendChannel {
 public:
  ShmSendChannel(std::uint32_t number, Slots<SlotLine, std::byte> slots, const Wiring& wiring)
      : lines_(slots.lines),
        payloads_(slots.payloads),
        released_(&wiring.peer_acks->released[number]),
        starved_word_(&wiring.own_acks->starved),
        starved_bit_(std::uint64_t{1} << number),
        bell_(wiring.bell),
        own_bell_(wiring.own_bell) {}

  std::byte* reserve(std::size_t bytes) override {
    PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "%zu bytes in one segment", bytes);
    if (has_room() == starved_) set_starved(!starved_);
    if (starved_) return nullptr;
    const std::uint64_t slot = next_ % kChannelDepth;
    return bytes <= kInlineBytes ? lines_[slot].payload : payloads_ + slot * kPayloadStride;
  }

  void commit(const SegmentHeader& header) override {
    PYCOLL_ASSERT(next_ - known_released_ < kChannelDepth, "segment %llu committed without room",
                  static_cast<unsigned long long>(next_));
    SlotLine& line = lines_[next_ % kChannelDepth];
    line.header = header;
    bell_->publish(line.stamp, ++next_);
  }

  // True once for room that came after a reserve() in vain.
  bool has_news() {
    if (!starved_ || !has_room()) return false;
    set_starved(false);
    return true;
  }

 private:
  // The peer's line is read only when its count, as known, leaves no room. A count beyond what was
  // sent, which only a broken peer writes, wraps and counts as full.
  bool has_room() {
    if (next_ - known_released_ < kChannelDepth) return true;
    const std::uint64_t released = load_ordered(*released_);
    if (next_ - released >= kChannelDepth) return false;
    known_released_ = released;
    return true;
  }

  // This rank alone writes the word, so plain reading back is enough. Peers heed only what was set
  // before arm(): who finds a channel full while armed must arm again before it sleeps.
  void set_starved(bool starved) {
    starved_ = starved;
    store_release(*starved_word_,
                  starved ? *starved_word_ | starved_bit_ : *starved_word_ & ~starved_bit_);
    if (starved) own_bell_->ring();
  }

  SlotLine* lines_;
  std::byte* payloads_;
  const std::uint64_t* released_;
  std::uint64_t* starved_word_;
  std::uint64_t starved_bit_;
  Bell* bell_;
  Bell* own_bell_;
  std::uint64_t next_ = 0;  // segments committed
  std::uint64_t known_released_ = 0;
  bool starved_ = false;
};

// The first header from the peer that cannot be. Set by a channel, judged by its link.
struct Fault {
  bool found = false;
  std::uint32_t claimed_bytes = 0;
};

class ShmRecvChannel final : public RecvChannel {
 public:
  // Once there is a fault, no channel of the link receives any more; `fault` outlives the channel.
  ShmRecvChannel(std::uint32_t number, Slots<const SlotLine, const std::byte> slots,
                 const Wiring& wiring, Fault* fault)
      : lines_(slots.lines),
        payloads_(slots.payloads),
        released_(&wiring.own_acks->released[number]),
        peer_starved_(&wiring.peer_acks->starved),
        starved_bit_(std::uint64_t{1} << number),
        bell_(wiring.bell),
        fault_(fault) {}

  const Segment* peek() override {
    if (peeked_) return &segment_;
    const SlotLine& line = lines_[head_ % kChannelDepth];
    if (load_acquire(line.stamp) != head_ + 1 || fault_->found) return nullptr;
    return take(line);
  }

  void release() override {
    PYCOLL_ASSERT(peeked_, "release of segment %llu before peek",
                  static_cast<unsigned long long>(head_));
    peeked_ = false;
    bell_->publish_if_wanted(*released_, ++head_, *peer_starved_, starved_bit_);
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
  const Segment* take(const SlotLine& line) {
    std::memcpy(&segment_.header, &line.header, sizeof(segment_.header));
    const std::uint32_t bytes = segment_.header.bytes;
    if (bytes > kSegmentBytesMax) {
      *fault_ = {true, bytes};
      return nullptr;
    }
    segment_.data = bytes == 0              ? nullptr
                    : bytes <= kInlineBytes ? line.payload
                                            : payloads_ + head_ % kChannelDepth * kPayloadStride;
    told_ = head_ + 1;
    peeked_ = true;
    return &segment_;
  }

  const SlotLine* lines_;
  const std::byte* payloads_;
  std::uint64_t* released_;
  const std::uint64_t* peer_starved_;
  std::uint64_t starved_bit_;
  Bell* bell_;
  Fault* fault_;
  std::uint64_t head_ = 0;  // segments released
  std::uint64_t told_ = 0;  // segments that the owner of this end knows of
  Segment segment_;
  bool peeked_ = false;
};

}  // namespace pycoll::transport::shm
