// The sending end of a shared-memory channel. All functions are inline. No call enters the kernel
// unless the peer sleeps.
#pragma once

#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/shm/shm_stores.h"
#include "transport/shm/shm_wiring.h"

namespace pycoll::transport::shm {

// State that every small segment touches. This base class comes before the abilities, so the state
// lies in the channel's first cache lines. Where ranks outnumber cores, caches are cold at each
// operation.
class SendRing {
 protected:
  SendRing(SlotLine* lines, const std::uint64_t* released, Bell* bell)
      : lines_(lines), released_(released), bell_(bell) {}

  SlotLine* lines_;
  const std::uint64_t* released_;
  Bell* bell_;
  std::uint64_t next_ = 0;  // segments committed
  std::uint64_t known_released_ = 0;
  std::uint64_t exposed_ = 0;  // segments committed up to the last exposed one; 0: none
  std::size_t reserved_bytes_ = 0;
  bool streamed_ = false;   // streaming stores have filled the reserved slot buffer
  bool starved_ = false;    // reserve() found no free slot
  bool undrained_ = false;  // drained() found memory that is still being read
};

struct SendAbilities : StoreHints, SourceRecord, ZeroCopySender, DirectWriter, Multicast {};

// A ring of slots. Each slot owns a slot buffer for one payload. A segment that repeats another
// channel's segment names that channel's buffer and leaves its own buffer idle. A buffer is free
// once all its readers have released it. If readers of other channels still use a buffer, the owner
// swaps it for the idle buffer of one of those channels. A slow reader therefore delays its own
// channel only.
class alignas(64) ShmSendChannel final : public SendChannel, SendRing, SendAbilities {
 public:
  // `lines` and `payloads` (kPayloadStride apart) are this channel's part of `shared_file`.
  ShmSendChannel(std::uint32_t number, Whole<std::byte> shared_file, SlotLine* lines,
                 std::byte* payloads, const Wiring& wiring)
      : SendRing(lines, &wiring.peer_acks->released[number], wiring.bell),
        shared_file_(shared_file.base),
        starved_word_(&wiring.own_acks->starved),
        starved_bit_(std::uint64_t{1} << number),
        own_bell_(wiring.own_bell),
        zero_copy_source_(wiring.zero_copy_source),
        peer_arena_(wiring.peer_arena),
        window_(&wiring.peer_acks->windows[number]),
        stores_(wiring.stores, wiring.reader_core) {
    for (std::uint32_t slot = 0; slot < kChannelDepth; ++slot) {
      slot_buffers_[slot].data = payloads + slot * kPayloadStride;
      owned_[slot] = &slot_buffers_[slot];
    }
  }
  // Not copyable: other channels refer to slot buffers and readers by address.
  ShmSendChannel(const ShmSendChannel&) = delete;
  ShmSendChannel& operator=(const ShmSendChannel&) = delete;

  std::byte* reserve(std::size_t bytes) override {
    PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "%zu bytes in one segment", bytes);
    if (!find_slot_buffer(bytes)) return nullptr;
    reserved_bytes_ = bytes;
    const std::uint64_t slot = next_ % kChannelDepth;
    if (bytes <= kInlineBytes) return lines_[slot].payload;
    return owned_[slot]->data;
  }

  // Copies at once, so that no handed-over memory is read afterwards.
  bool hand_over(const SegmentHeader& header, const std::byte* data) override {
    std::byte* const slot_buffer = reserve(header.bytes);
    if (slot_buffer != nullptr && header.bytes != 0) fill(slot_buffer, data, header.bytes);
    if (slot_buffer != nullptr) commit(header);
    return slot_buffer != nullptr;
  }

  void commit(const SegmentHeader& header) override {
    PYCOLL_ASSERT(next_ - known_released_ < kChannelDepth, "segment %llu committed without a slot",
                  static_cast<unsigned long long>(next_));
    const std::uint64_t slot = next_ % kChannelDepth;
    if (std::exchange(streamed_, false)) stream_fence();
    publish(header, lines_[slot].payload, owned_[slot]);
  }

  bool drained() override {
    if (is_drained()) return true;
    if (!undrained_) set_wanted(starved_, true);
    return false;
  }

  SendCapabilities capabilities() override {
    return {.store_hints = this,
            .sources = this,
            .zero_copy = this,
            .direct_writer = this,
            .multicast = this};
  }

  // Returns true once after each of two events: a slot became free after none was found, or
  // exposed memory was read after drained() returned false.
  bool has_news() {
    if (starved_ && has_space()) {
      set_wanted(false, undrained_);
      return true;
    }
    if (!undrained_ || !is_drained()) return false;
    set_wanted(starved_, false);
    return true;
  }

 private:
  static constexpr std::size_t kReadersMax = 8;
  static constexpr std::uint8_t kUsesMax = 64;  // bits of WriteWindow::uses
  // A segment of another channel whose payload is in this channel's slot buffer.
  struct Reader {
    ShmSendChannel* channel;
    std::uint64_t segments;  // the segment is released when its channel has released this many
  };
  struct SlotBuffer {
    std::byte* data = nullptr;
    std::size_t reader_count = 0;
    Reader readers[kReadersMax] = {};
  };

  void fill(std::byte* slot_buffer, const std::byte* from, std::size_t bytes) override {
    streamed_ |= stores_.fill(reserved_bytes_, slot_buffer, from, bytes);
  }
  bool wants_fill() const override { return stores_.wants_fill(reserved_bytes_); }

  bool flushed() override { return true; }
  bool reads(const std::byte* /*data*/, std::size_t /*bytes*/) override { return false; }

  const void* memory() const override { return shared_file_; }

  bool repeat(const SegmentHeader& header, SendChannel& other) override {
    if (!find_slot_buffer(header.bytes)) return false;
    const auto& source = static_cast<const ShmSendChannel&>(other);
    const std::uint64_t last = (source.next_ - 1) % kChannelDepth;
    SlotBuffer* slot_buffer = source.owned_[last];
    if (header.bytes > kInlineBytes) {
      PYCOLL_ASSERT(slot_buffer->reader_count < kReadersMax, "%zu peers read a payload",
                    kReadersMax);
      slot_buffer->readers[slot_buffer->reader_count++] = {this, next_ + 1};
    }
    publish(header, source.lines_[last].payload, slot_buffer);
    return true;
  }

  // Data in this core's cache is exposed only where cache lines move quickly between cores;
  // elsewhere a copy is faster than a zero-copy read.
  bool is_exposable(const std::byte* data, std::size_t bytes, bool fresh) override {
    std::uint64_t offset = 0;
    return !(fresh && stores_.wants_fill(bytes)) && zero_copy_source_->find(data, bytes, &offset);
  }

  bool expose(const SegmentHeader& header, const std::byte* data) override {
    std::uint64_t offset = 0;
    const bool found = zero_copy_source_->find(data, header.bytes, &offset);
    PYCOLL_ASSERT(found, "%u bytes exposed that the peer cannot read", header.bytes);
    if (!find_slot_buffer(header.bytes)) return false;
    publish_location(header, offset | kZeroCopyBit);
    exposed_ = next_;
    return true;
  }

  std::byte* find_window(const SegmentHeader& header, const DirectWrite& direct_write) override {
    if (header.bytes < kUncopiedBytesMin || direct_write.use >= kUsesMax) return nullptr;
    const std::uint64_t sequence = load_acquire(window_->sequence);
    if (sequence != header.sequence) return nullptr;
    const std::uint64_t agreement = load_acquire(window_->agreement);
    const std::uint64_t uses = load_acquire(window_->uses);
    const std::uint64_t generation = load_acquire(window_->generation);
    const std::uint64_t offset = load_acquire(window_->offset);
    const std::uint64_t bytes = load_acquire(window_->bytes);
    if (load_acquire(window_->sequence) != sequence || agreement != header.agreement ||
        (uses >> direct_write.use & 1) == 0 || direct_write.offset > bytes ||
        header.bytes > bytes - direct_write.offset || !find_slot_buffer(0)) {
      return nullptr;
    }
    std::byte* there =
        peer_arena_->writable(generation, offset + direct_write.offset, header.bytes);
    if (there != nullptr) streams_window_ = window_wants_streams(bytes, direct_write.cached);
    return there;
  }
  bool is_answered(const SegmentHeader& header) override {
    const std::uint64_t sequence = load_acquire(window_->sequence);
    return sequence != 0 && static_cast<std::int64_t>(sequence - header.sequence) >= 0;
  }
  void write(std::byte* there, const std::byte* from, std::size_t bytes) override {
    streams_window_ ? stream_copy(there, from, bytes) : copy_bytes(there, from, bytes);
    streamed_ |= streams_window_;
  }
  void commit_written(const SegmentHeader& header) override {
    if (std::exchange(streamed_, false)) stream_fence();
    publish_location(header, kWrittenDirectlyBit);
  }

  // Makes the next slot usable for a segment of `bytes`; false while the channel is full. A small
  // payload needs the slot's line only and no slot buffer.
  [[nodiscard]] bool find_slot_buffer(std::size_t bytes) {
    if (has_space() == starved_) set_wanted(!starved_, undrained_);
    if (starved_) return false;
    const std::uint64_t slot = next_ % kChannelDepth;
    if (bytes > kInlineBytes && owned_[slot]->reader_count != 0) vacate(slot);
    return true;
  }

  // Gives the slot a buffer that no other channel's receiver reads.
  void vacate(std::uint64_t slot) {
    SlotBuffer& slot_buffer = *owned_[slot];
    std::size_t kept = 0;
    for (std::size_t i = 0; i < slot_buffer.reader_count; ++i) {
      const Reader reader = slot_buffer.readers[i];
      if (!reader.channel->has_released(reader.segments)) slot_buffer.readers[kept++] = reader;
    }
    slot_buffer.reader_count = kept;
    if (kept == 0) return;
    const Reader& reader = slot_buffer.readers[0];
    std::swap(owned_[slot], reader.channel->owned_[(reader.segments - 1) % kChannelDepth]);
  }

  bool has_released(std::uint64_t segments) {
    if (known_released_ < segments) note_released();
    return known_released_ >= segments;
  }

  // `inlined` is the payload if it is short; otherwise the payload is in `slot_buffer`.
  void publish(const SegmentHeader& header, const std::byte* inlined,
               const SlotBuffer* slot_buffer) {
    if (header.bytes > kInlineBytes) {
      return publish_location(header, static_cast<std::uint64_t>(slot_buffer->data - shared_file_));
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

  void publish_location(const SegmentHeader& header, std::uint64_t offset) {
    SlotLine& line = lines_[next_ % kChannelDepth];
    line.header = header;
    std::memcpy(line.payload, &offset, sizeof(offset));
    bell_->publish(line.stamp, ++next_);
  }

  bool is_drained() { return exposed_ == 0 || has_released(exposed_); }

  // Reads the peer's line only if its last known count leaves no free slot.
  bool has_space() {
    if (next_ - known_released_ < kChannelDepth) return true;
    note_released();
    return next_ - known_released_ < kChannelDepth;
  }

  // Ignores a count greater than the number of sent segments, which only a faulty peer writes.
  void note_released() {
    const std::uint64_t released = load_ordered(*released_);
    if (next_ - released <= next_ - known_released_) known_released_ = released;
  }

  // Sets the reasons for which this rank waits for the peer's releases: a free slot, or the
  // end of reads of exposed memory. Only this rank writes the word, so it may read it back
  // without ordering. A peer is certain to see only bits that were set before arm(). A rank
  // that finds a channel full while it is armed must arm again before it sleeps; ringing its
  // own bell makes it do so.
  void set_wanted(bool slot, bool drain) {
    const bool more = (slot && !starved_) || (drain && !undrained_);
    starved_ = slot;
    undrained_ = drain;
    store_release(*starved_word_,
                  slot || drain ? *starved_word_ | starved_bit_ : *starved_word_ & ~starved_bit_);
    if (more) own_bell_->ring();
  }

  const std::byte* shared_file_;
  // By slot: slot buffers of this channel, or of channels with which it has exchanged buffers.
  SlotBuffer* owned_[kChannelDepth];
  std::uint64_t* starved_word_;
  std::uint64_t starved_bit_;
  Bell* own_bell_;
  ZeroCopySource* zero_copy_source_;
  PeerArena* peer_arena_;
  const WindowLine* window_;
  Stores stores_;
  bool streams_window_ = false;  // whether write() streams into the last window found
  SlotBuffer slot_buffers_[kChannelDepth];
};

}  // namespace pycoll::transport::shm
