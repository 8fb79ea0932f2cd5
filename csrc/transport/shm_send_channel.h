// The sending end of a shared-memory channel. All in line: no call here enters the kernel unless
// the peer sleeps.
#pragma once

#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/shm_places.h"
#include "transport/shm_wiring.h"

namespace pycoll::transport::shm {

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
        stores_(wiring.stores),
        places_(wiring.stores) {
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
    streamed_ |= stores_.fill(reserved_bytes_, room, from, bytes);
  }
  // As every medium that copies, but in line: most short operations consist of this.
  bool hand_over(const SegmentHeader& header, const std::byte* data) override {
    std::byte* const room = reserve(header.bytes);
    if (room != nullptr && header.bytes != 0) fill(room, data, header.bytes);
    if (room != nullptr) commit(header);
    return room != nullptr;
  }
  bool wants_fill() const override { return stores_.wants_fill(reserved_bytes_); }

  void commit(const SegmentHeader& header) override {
    PYCOLL_ASSERT(next_ - known_released_ < kChannelDepth, "segment %llu committed without room",
                  static_cast<unsigned long long>(next_));
    const std::uint64_t slot = next_ % kChannelDepth;
    if (std::exchange(streamed_, false)) stream_fence();
    stores_.finish(header.bytes);
    publish(header, lines_[slot].payload, owned_[slot]);
  }

  bool shares_core() const override { return stores_.is_crowded(); }

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
    return !(fresh && stores_.wants_fill(bytes)) && lender_->find(data, bytes, &offset);
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
    std::byte* there = borrower_->writable(generation, offset + landing.offset, header.bytes);
    if (there != nullptr) places_.aim(next_, sequence, landing.offset, bytes);
    return there;
  }
  bool answered(const SegmentHeader& header) override {
    const std::uint64_t sequence = load_acquire(offer_->sequence);
    return sequence != 0 && static_cast<std::int64_t>(sequence - header.sequence) >= 0;
  }
  void place(std::byte* there, const std::byte* from, std::size_t bytes) override {
    streamed_ |= places_.put(there, from, bytes);
  }
  void commit_placed(const SegmentHeader& header) override {
    if (std::exchange(streamed_, false)) stream_fence();
    places_.finish();
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
  [[nodiscard]] bool find_room(std::size_t bytes) {
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
  Places places_;
  Room rooms_[kChannelDepth];
};

}  // namespace pycoll::transport::shm
