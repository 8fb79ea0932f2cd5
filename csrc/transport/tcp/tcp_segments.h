// The segments of a TCP link's channels: counters, slot buffers and credits. The streams
// (tcp_stream.h) frame the segments and move their bytes; the executor and the engine use them
// through the channels (tcp_channel.h). The segments of a channel may take several streams and thus
// arrive out of order; both ends identify them by their numbers. WIRE.md explains the credits.
//
// Threads: those of the Transport. A link owns them, and they outlive its streams and channels.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "transport/tcp/frame.h"
#include "transport/transport.h"

namespace pycoll::transport {

// The set of completed segments of a channel. Segments may complete in any order.
class Tally {
 public:
  // Requires: the segment is new, and fewer than kTcpDepth segments lie between it and before().
  void add(std::uint32_t segment) {
    beyond_ |= bit(segment);
    for (; (beyond_ & bit(before_)) != 0; ++before_) beyond_ &= ~bit(before_);
  }
  // The number of the first segment that is not completed.
  std::uint32_t before() const { return before_; }
  // Requires: as for add().
  bool has(std::uint32_t segment) const { return (beyond_ & bit(segment)) != 0; }

 private:
  static std::uint32_t bit(std::uint32_t segment) { return 1u << segment % kTcpDepth; }
  static_assert(kTcpDepth <= 32 && (kTcpDepth & (kTcpDepth - 1)) == 0, "numbers wrap around");

  std::uint32_t before_ = 0;
  std::uint32_t beyond_ = 0;
};

// kTcpDepth slot buffers of kSegmentBytesMax, 64-byte aligned. The first at() allocates them. Each
// has space for a frame header in front, so that one read can fetch a whole frame.
class StagingSlots {
 public:
  // Requires: slot_buffer < kTcpDepth.
  std::byte* at(std::uint32_t slot_buffer);

 private:
  static constexpr std::align_val_t kAlignment{64};
  static constexpr std::size_t kFront = 64;
  static_assert(kFront >= sizeof(FrameHeader) &&
                kFront % static_cast<std::size_t>(kAlignment) == 0);
  // Not a multiple of 4096: neighbouring slots would share their cache sets.
  static constexpr std::size_t kStride = kFront + kSegmentBytesMax + 256;
  static_assert(kStride % static_cast<std::size_t>(kAlignment) == 0 && kStride % 4096 != 0);

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, kAlignment); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
};

// The free slot buffers. take() returns the most recently freed one, because it is still cached.
class FreeSlotBuffers {
 public:
  FreeSlotBuffers() {
    for (std::uint32_t slot_buffer = 0; slot_buffer < kTcpDepth; ++slot_buffer)
      give_back(kTcpDepth - 1 - slot_buffer);
  }
  std::size_t count() const { return count_; }
  // The buffer that take() returns after `others` further calls. Requires: others < count().
  std::uint8_t next(std::size_t others) const { return slot_buffers_[count_ - 1 - others]; }
  // Requires: fewer than kTcpDepth are taken.
  std::uint8_t take() { return slot_buffers_[--count_]; }
  void give_back(std::uint32_t slot_buffer) {
    slot_buffers_[count_++] = static_cast<std::uint8_t>(slot_buffer);
  }

 private:
  std::array<std::uint8_t, kTcpDepth> slot_buffers_ = {};
  std::size_t count_ = 0;
};

// The segments of one channel that this rank sends. Counters start at zero and never reset; they
// count modulo 2^32:
//   released <= written.before() <= committed <= released + kTcpDepth
class OutgoingSegments {
 public:
  explicit OutgoingSegments(std::uint32_t channel) : channel_(channel) {}

  std::uint32_t channel() const { return channel_; }
  bool full() const { return committed_ - released_ == kTcpDepth; }
  // The slot buffer of the next segment. Requires, as add(): !full().
  std::byte* next_slot() { return slots_.at(committed_ % kTcpDepth); }
  // Commits the next segment; returns its number.
  std::uint32_t add(const SegmentHeader& header, const std::byte* data) {
    segments_[committed_ % kTcpDepth] = {header, data};
    return committed_++;
  }
  // Whether every committed segment was written.
  bool all_written() const { return written_.before() == committed_; }
  // Whether a segment that is not written has its payload in this memory.
  bool reads(const std::byte* data, std::size_t bytes) const;

  // The segment; its memory stays valid until note_written(). Requires: it was submitted to a
  // stream and is not yet written.
  const Segment& at(std::uint32_t segment) const { return segments_[segment % kTcpDepth]; }
  // Releases the segment's memory: the kernel has taken it whole, or it will never be sent.
  void note_written(std::uint32_t segment) { written_.add(segment); }
  // Takes the peer's counter of released segments; false if it counts segments that were not sent.
  [[nodiscard]] bool accept_released(std::uint8_t released);
  // Copies unwritten segments into the slot buffers, so that the caller may reuse its memory.
  void let_go();

 private:
  const std::uint32_t channel_;
  std::array<Segment, kTcpDepth> segments_;
  StagingSlots slots_;
  std::uint32_t committed_ = 0;
  std::uint32_t released_ = 0;
  Tally written_;
};

// The segments of one channel that come from the peer:
//   announced <= released <= received.before() <= announced + kTcpDepth
class IncomingSegments {
 public:
  // The oldest segment that has arrived, or nullptr.
  const Segment* oldest();
  // Releases it. Requires: oldest() is not nullptr.
  void release();
  // True if the peer should get a credit now even without data in its direction: it may already be
  // waiting for a free slot, or would soon.
  bool is_credit_due() const;
  // Whether the credit should leave at once. While more segments wait here, the caller will release
  // again soon: two releases cost one frame.
  bool is_credit_urgent() const {
    return released_ - announced_ >= kManyReleases || received_.before() == released_;
  }

  // Starts a segment with this number modulo 2^16 and returns the memory for its payload. nullptr
  // if it has started before, or if the peer's credits do not allow it.
  [[nodiscard]] std::byte* begin(const SegmentHeader& header, std::uint16_t segment);
  // Fills in the payload addresses of the next segments, in the order in which they will start, and
  // returns their number (at most `places`). Space for a frame header precedes each address. The
  // memory stays unused until then.
  template <std::size_t places>
  std::size_t predict(std::array<std::byte*, places>* payloads) {
    const std::size_t known = std::min(places, free_.count());
    for (std::size_t i = 0; i < known; ++i) (*payloads)[i] = slots_.at(free_.next(i));
    return known;
  }
  // The segment's payload has arrived whole. Requires: begin() returned its memory.
  void complete(std::uint16_t segment) { received_.add(number_of(segment)); }
  // The counter for the next frame on the home stream. Marks all releases as announced.
  std::uint8_t announce();

 private:
  // The full number of a segment within the peer's credits, from its value modulo 2^16.
  std::uint32_t number_of(std::uint16_t segment) const {
    return announced_ +
           static_cast<std::uint16_t>(segment - static_cast<std::uint16_t>(announced_));
  }
  // This many unannounced releases are announced even to a sender that still has credits, to keep
  // it going. Fewer wait for data in its direction.
  static constexpr std::uint32_t kManyReleases = kTcpDepth * 3 / 4;

  std::array<SegmentHeader, kTcpDepth> headers_;
  StagingSlots slots_;
  FreeSlotBuffers free_;
  std::array<std::uint8_t, kTcpDepth> slot_buffers_ = {};  // by segment that has begun
  Segment oldest_;
  Tally received_;
  std::array<bool, kTcpDepth> begun_ = {};  // begun and not released
  std::uint32_t released_ = 0;
  std::uint32_t announced_ = 0;
};

// The segments of all channels of a link, each created on first use.
class LinkSegments {
 public:
  // Requires: number < kChannelsMax.
  OutgoingSegments& out(std::uint32_t number);
  IncomingSegments& in(std::uint32_t number);
  // nullptr for a channel that was never used.
  OutgoingSegments* used_out(std::uint32_t number) const { return out_[number].get(); }
  IncomingSegments* used_in(std::uint32_t number) const { return in_[number].get(); }
  void let_go();

 private:
  std::array<std::unique_ptr<OutgoingSegments>, kChannelsMax> out_;
  std::array<std::unique_ptr<IncomingSegments>, kChannelsMax> in_;
};

}  // namespace pycoll::transport
