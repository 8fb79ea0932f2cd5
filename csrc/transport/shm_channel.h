// The two ends of a shared-memory channel. All in line: no call here enters the kernel unless the
// peer sleeps.
#pragma once

#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/shm_bell.h"
#include "transport/shm_layout.h"
#include "transport/shm_lending.h"
#include "transport/shm_stores.h"

namespace pycoll::transport::shm {

// The whole of one rank's shared segment.
template <typename Byte>
struct Whole {
  Byte* base;
  std::size_t bytes;
};

// What a channel stands on besides its slots; all of it outlives the channel.
struct Wiring {
  AckLine* own_acks;
  const AckLine* peer_acks;
  Bell* bell;      // wakes the peer
  Bell* own_bell;  // wakes this rank itself, if it is armed
  Lender* lender;
  Borrower* borrower;
  std::optional<bool> streaming;  // see Stores
};

// A ring of slots. Every slot owns room for a payload; a segment that repeats another channel's
// leaves its own room idle and names the other's. Room is free once all who read it have released
// it. Its owner does not wait for readers on other channels: it exchanges rooms with one of them,
// whose own is idle. So how far channels run ahead of each other stays their receivers' business.
class alignas(64) ShmSendChannel final : public SendChannel {
 public:
  // `lines` and `payloads` (kPayloadStride apart) are the channel's part of `segment`.
  ShmSendChannel(std::uint32_t number, Whole<std::byte> segment, SlotLine* lines,
                 std::byte* payloads, const Wiring& wiring)
      : lines_(lines),
        released_(&wiring.peer_acks->released[number]),
        bell_(wiring.bell),
        segment_(segment.base),
        starved_word_(&wiring.own_acks->starved),
        starved_bit_(std::uint64_t{1} << number),
        own_bell_(wiring.own_bell),
        lender_(wiring.lender),
        borrower_(wiring.borrower),
        offer_(&wiring.peer_acks->offers[number]),
        stores_(wiring.streaming) {
    for (std::uint32_t slot = 0; slot < kChannelDepth; ++slot) {
      rooms_[slot].data = payloads + slot * kPayloadStride;
      owned_[slot] = &rooms_[slot];
    }
  }
  ShmSendChannel(const ShmSendChannel&) = delete;  // rooms and readers are known by address
  ShmSendChannel& operator=(const ShmSendChannel&) = delete;

  std::byte* reserve(std::size_t bytes) override {
    PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "%zu bytes in one segment", bytes);
    if (!find_room(bytes)) return nullptr;
    reserved_bytes_ = bytes;
    const std::uint64_t slot = next_ % kChannelDepth;
    if (bytes <= kInlineBytes) return lines_[slot].payload;
    return owned_[slot]->data;
  }

  void fill(std::byte* room, const std::byte* from, std::size_t bytes) override {
    streamed_ |= stores_.fill(next_, reserved_bytes_, room, from, bytes);
  }
  // As every medium that copies, but in line: most short operations consist of this.
  bool hand_over(const SegmentHeader& header, const std::byte* data) override {
    std::byte* const room = reserve(header.bytes);
    if (room != nullptr && header.bytes != 0) fill(room, data, header.bytes);
    if (room != nullptr) commit(header);
    return room != nullptr;
  }
  bool wants_fill() const override { return stores_.wants_fill(next_, reserved_bytes_); }

  void commit(const SegmentHeader& header) override {
    PYCOLL_ASSERT(next_ - known_released_ < kChannelDepth, "segment %llu committed without room",
                  static_cast<unsigned long long>(next_));
    const std::uint64_t slot = next_ % kChannelDepth;
    if (std::exchange(streamed_, false)) stream_fence();
    publish(header, lines_[slot].payload, owned_[slot]);
  }

  const void* memory() const override { return segment_; }

  bool repeat(const SegmentHeader& header, SendChannel& other) override {
    if (!find_room(header.bytes)) return false;
    const auto& lender = static_cast<const ShmSendChannel&>(other);
    const std::uint64_t last = (lender.next_ - 1) % kChannelDepth;
    Room* room = lender.owned_[last];
    if (header.bytes > kInlineBytes) {
      PYCOLL_ASSERT(room->reader_count < kReadersMax, "%zu peers read a payload", kReadersMax);
      room->readers[room->reader_count++] = {this, next_ + 1};
    }
    publish(header, lender.lines_[last].payload, room);
    return true;
  }

  // What is in the cache of this core is lent only where lines are quick between caches: elsewhere
  // lending took up to twice the time of an all_reduce of 4 to 256 MiB.
  bool lendable(const std::byte* data, std::size_t bytes, bool fresh) override {
    std::uint64_t offset = 0;
    return !(fresh && stores_.wants_fill(next_, bytes)) && lender_->find(data, bytes, &offset);
  }

  bool lend(const SegmentHeader& header, const std::byte* data) override {
    std::uint64_t offset = 0;
    const bool found = lender_->find(data, header.bytes, &offset);
    PYCOLL_ASSERT(found, "%u bytes lent that the peer cannot read", header.bytes);
    if (!find_room(header.bytes)) return false;
    publish_place(header, offset | kLentBit);
    lent_ = next_;
    return true;
  }

  std::byte* offered(const SegmentHeader& header, const Landing& landing) override {
    if (header.bytes < kPlacedBytesMin || landing.use >= kUsesMax) return nullptr;
    const std::uint64_t sequence = load_acquire(offer_->sequence);
    if (sequence != header.sequence) return nullptr;
    const std::uint64_t agreement = load_acquire(offer_->agreement);
    const std::uint64_t uses = load_acquire(offer_->uses);
    const std::uint64_t generation = load_acquire(offer_->generation);
    const std::uint64_t offset = load_acquire(offer_->offset);
    const std::uint64_t bytes = load_acquire(offer_->bytes);
    if (load_acquire(offer_->sequence) != sequence || agreement != header.agreement ||
        (uses >> landing.use & 1) == 0 || landing.offset > bytes ||
        header.bytes > bytes - landing.offset || !find_room(0)) {
      return nullptr;
    }
    return borrower_->writable(generation, offset + landing.offset, header.bytes);
  }
  // The peer reads it later than this rank wrote it, and from memory where it does not share
  // caches.
  void place(std::byte* there, const std::byte* from, std::size_t bytes) override {
    stream_copy(there, from, bytes);
    streamed_ = true;
  }
  void commit_placed(const SegmentHeader& header) override {
    if (std::exchange(streamed_, false)) stream_fence();
    publish_place(header, kPlacedBit);
  }

  bool drained() override {
    if (is_drained()) return true;
    if (!undrained_) want(starved_, true);
    return false;
  }
  bool flushed() override { return true; }  // what is handed over is copied at once

  // True once for room that came after a reserve() in vain, or the end of what was lent.
  bool has_news() {
    if (starved_ && has_room()) {
      want(false, undrained_);
      return true;
    }
    if (!undrained_ || !is_drained()) return false;
    want(starved_, false);
    return true;
  }

 private:
  static constexpr std::size_t kReadersMax = 8;
  static constexpr std::uint8_t kUsesMax = 64;  // bits of Offer::uses
  // A segment of another channel whose payload lies here.
  struct Reader {
    ShmSendChannel* channel;
    std::uint64_t segments;  // released so many, the channel's receiver has released this one
  };
  struct Room {
    std::byte* data = nullptr;
    std::size_t reader_count = 0;
    Reader readers[kReadersMax] = {};
  };

  // For a segment of `bytes`; small ones need no room but their line's.
  bool find_room(std::size_t bytes) {
    if (has_room() == starved_) want(!starved_, undrained_);
    if (starved_) return false;
    const std::uint64_t slot = next_ % kChannelDepth;
    if (bytes > kInlineBytes && owned_[slot]->reader_count != 0) vacate(slot);
    return true;
  }

  // Gives the slot room that nobody reads.
  void vacate(std::uint64_t slot) {
    Room& room = *owned_[slot];
    std::size_t kept = 0;
    for (std::size_t i = 0; i < room.reader_count; ++i) {
      const Reader reader = room.readers[i];
      if (!reader.channel->has_released(reader.segments)) room.readers[kept++] = reader;
    }
    room.reader_count = kept;
    if (kept == 0) return;
    const Reader& reader = room.readers[0];
    std::swap(owned_[slot], reader.channel->owned_[(reader.segments - 1) % kChannelDepth]);
  }

  bool has_released(std::uint64_t segments) {
    if (known_released_ < segments) note_released();
    return known_released_ >= segments;
  }

  // `inlined` is the payload if it is short, otherwise it lies in `room`.
  void publish(const SegmentHeader& header, const std::byte* inlined, const Room* room) {
    if (header.bytes > kInlineBytes) {
      return publish_place(header, static_cast<std::uint64_t>(room->data - segment_));
    }
    SlotLine& line = lines_[next_ % kChannelDepth];
    line.header = header;
    if (inlined != line.payload) {
      std::memcpy(line.payload, inlined, kFirstLineBytes);
      if (header.bytes > kFirstLineBytes) {
        std::memcpy(line.payload + kFirstLineBytes, inlined + kFirstLineBytes,
                    kInlineBytes - kFirstLineBytes);
      }
    }
    bell_->publish(line.stamp, ++next_);
  }

  void publish_place(const SegmentHeader& header, std::uint64_t offset) {
    SlotLine& line = lines_[next_ % kChannelDepth];
    line.header = header;
    std::memcpy(line.payload, &offset, sizeof(offset));
    bell_->publish(line.stamp, ++next_);
  }

  bool is_drained() { return lent_ == 0 || has_released(lent_); }

  // The peer's line is read only when its count, as known, leaves no room.
  bool has_room() {
    if (next_ - known_released_ < kChannelDepth) return true;
    note_released();
    return next_ - known_released_ < kChannelDepth;
  }

  // A count beyond what was sent, which only a broken peer writes, counts for nothing.
  void note_released() {
    const std::uint64_t released = load_ordered(*released_);
    if (next_ - released <= next_ - known_released_) known_released_ = released;
  }

  // What the peer's releases are wanted for: room, or the end of what was lent. This rank alone
  // writes the word, so plain reading back is enough. Peers heed only what was set before arm():
  // who finds a channel full while armed must arm again before it sleeps.
  void want(bool room, bool drain) {
    const bool more = (room && !starved_) || (drain && !undrained_);
    starved_ = room;
    undrained_ = drain;
    store_release(*starved_word_,
                  room || drain ? *starved_word_ | starved_bit_ : *starved_word_ & ~starved_bit_);
    if (more) own_bell_->ring();
  }

  // One line is all that a small segment needs: with more ranks than cores each operation finds the
  // caches cold.
  SlotLine* lines_;
  const std::uint64_t* released_;
  Bell* bell_;
  std::uint64_t next_ = 0;  // segments committed
  std::uint64_t known_released_ = 0;
  std::uint64_t lent_ = 0;  // segments committed when the last one was lent; 0: none
  std::size_t reserved_bytes_ = 0;
  bool streamed_ = false;   // into the room that is reserved
  bool starved_ = false;    // reserve() found no room
  bool undrained_ = false;  // drained() found what is still being read

  const std::byte* segment_;
  Room* owned_[kChannelDepth];  // by slot; rooms of this channel and of those it exchanged with
  std::uint64_t* starved_word_;
  std::uint64_t starved_bit_;
  Bell* own_bell_;
  Lender* lender_;
  Borrower* borrower_;
  const OfferLine* offer_;
  Stores stores_;
  Room rooms_[kChannelDepth];
};

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
        offer_(&wiring.own_acks->offers[number]) {}

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
    if (!lender_->tell(offer.memory, offer.bytes, &offset)) return;
    store_release(offer_->sequence, 0);
    store_release(offer_->agreement, offer.agreement);
    store_release(offer_->uses, offer.uses);
    store_release(offer_->generation, lender_->generation());
    store_release(offer_->offset, offset);
    store_release(offer_->bytes, offer.bytes);
    store_release(offer_->sequence, offer.sequence);
    offered_ = offer.memory;
  }
  // Sees to it that what was offered last goes to nobody else.
  void keep_offered() {
    if (offered_ != nullptr) lender_->keep(offered_);
  }

  void release() override {
    PYCOLL_ASSERT(peeked_, "release of segment %llu before peek",
                  static_cast<unsigned long long>(head_));
    peeked_ = false;
    if (std::exchange(arrived_.lent, false)) borrower_->give_back();
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
    return &arrived_;
  }

  // Where the payload lies; nullptr if that is nowhere.
  const std::byte* find(const SlotLine& line, std::uint32_t bytes, std::uint64_t offset) {
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
};

}  // namespace pycoll::transport::shm
