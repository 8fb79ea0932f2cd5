// The channels of the verbs transport: counters over slots of registered memory. A channel posts
// nothing itself; it submits segments to its link (ChannelOwner). VERBS.md explains the credits.
//
// Threads: those of the Transport. A link owns its channels and outlives every call to them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "transport/capabilities.h"
#include "transport/verbs/verbs_layout.h"
#include "transport/verbs/verbs_rail.h"

namespace pycoll::transport::verbs {

// The link, as its channels see it: the state that they share, and requests to send.
class ChannelOwner {
 public:
  // The rail that carries a segment of a channel.
  const Rail& rail_of(std::uint32_t channel, std::uint32_t segment) const {
    return rails[rail_of_segment(channel, segment, static_cast<std::uint32_t>(rails.size()))];
  }
  // Queues the committed segment of channel `number`.
  virtual void submit(std::uint32_t number) = 0;
  // Slots of channel `number` were released. The peer receives the count now or with the next
  // flush().
  virtual void credit_due(std::uint32_t number, bool now) = 0;

  std::vector<Rail> rails;
  // A caller polled without success, so the next completion of a send counts as progress.
  bool has_waiter = false;
  // Nothing is sent from user memory any more.
  bool has_let_go = false;

 protected:
  ~ChannelOwner() = default;
};

// Counters start at zero and wrap modulo 2^32:
//   released <= posted <= committed <= released + kVerbsDepth
// A slot is free again once its segment was released and the device no longer reads the slot. The
// two events come in either order: the peer's count can arrive before the acknowledgement that
// completes the send.
//
// A payload in registered memory is sent from there, and a payload for the peer's region is written
// there. Such a segment uses only the header of its slot.
class VerbsSendChannel final : public SendChannel, SourceRecord, ZeroCopySender, RegionSender {
 public:
  // Slots lie in the outgoing areas of the link's rails, after Rail::open().
  VerbsSendChannel(std::uint32_t number, ChannelOwner& link) : number_(number), link_(link) {}

  std::byte* reserve(std::size_t bytes) override;
  void commit(const SegmentHeader& header) override;
  bool hand_over(const SegmentHeader& header, const std::byte* data) override;
  // Also false while committed segments wait for the device: their owner may not poll for a long
  // time after it is true.
  bool drained() override;
  SendCapabilities capabilities() override {
    return {.sources = this, .zero_copy = this, .regions = this};
  }

  // --- for the link
  // Whether the device reads no user memory.
  bool flushed() override;
  std::uint32_t number() const { return number_; }
  std::uint32_t next() const { return posted_; }
  // Source and destination of the next segment's payload, if they are not its slots.
  struct Route {
    const std::byte* source = nullptr;  // nullptr: the segment's slot
    std::uint32_t key = 0;
    bool in_region = false;  // `source` lies in this rank's region
    std::uint64_t to = Passage::kSlotBuffer;
  };
  Route route() const;
  // The next segment was given to the device, which reads the slot and the source until `position`
  // is done.
  void note_posted(std::uint64_t position);
  // Accepts the peer's count of released segments, given modulo 2^bits. Returns false if it counts
  // segments that were never sent.
  [[nodiscard]] bool accept_released(std::uint32_t released, int bits);
  // Whether the device of this rail may be reading user memory, as of the last flushed().
  bool reads_over(const Rail& rail) const;
  // Ends all sending on the channel.
  void abandon();
  // Copies payloads that the device does not yet have into their slots, so that the user's memory
  // is free.
  void let_go();

 private:
  static constexpr std::size_t kNothing = ~std::size_t{0};
  // A position that is never done.
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  // Shorter payloads are copied, because a copy costs no more than the completion of a send from
  // user memory.
  static constexpr std::size_t kInPlaceBytesMin = 16 * 1024;

  // Memory that the device reads or will read, outside of the slots.
  struct Source {
    const std::byte* data = nullptr;  // nullptr: there is no source
    std::size_t bytes = 0;
    Registration* registration = nullptr;  // nullptr: `data` is in the region
  };

  bool reads(const std::byte* data, std::size_t bytes) override;
  // True if the device can send this memory without a copy. A fold into such memory needs no copy
  // in a slot.
  bool is_exposable(const std::byte* data, std::size_t bytes, bool fresh) override;
  // The verbs transport exposes a segment by handing it over: the device reads it and completes the
  // request once it has.
  bool expose(const SegmentHeader& header, const std::byte* data) override {
    return hand_over(header, data);
  }
  bool pass(const SegmentHeader& header, const Passage& passage) override;
  [[nodiscard]] Registration* acquire(const std::byte* data, std::size_t bytes) const;
  bool has_space();
  void set_source(const Source& source);
  void submit(const SegmentHeader& header, std::uint64_t to = Passage::kSlotBuffer);
  void release_read_sources();
  void drop(std::uint32_t segment);

  const std::uint32_t number_;
  ChannelOwner& link_;
  // by slot: the position after which it is free
  std::array<std::uint64_t, kVerbsDepth> free_at_{};
  std::array<Source, kVerbsDepth> sources_;           // by slot
  std::array<std::uint64_t, kVerbsDepth> targets_{};  // by slot, as Passage::to
  int source_count_ = 0;
  std::size_t reserved_bytes_ = kNothing;
  std::uint32_t committed_ = 0;
  std::uint32_t posted_ = 0;
  std::uint32_t released_ = 0;
  bool abandoned_ = false;
};

// announced <= released <= received <= announced + kVerbsDepth
// Segments of different rails arrive in any order. All segments before number `received` have
// arrived; later ones may have.
class VerbsRecvChannel final : public RecvChannel {
 public:
  // Segments lie in the incoming areas of the link's rails, after Rail::open().
  VerbsRecvChannel(std::uint32_t number, ChannelOwner& link) : number_(number), link_(link) {}

  const Segment* peek() override;
  void release() override;

  // --- for the link
  // Whether the peer may send a segment whose number is `number` modulo 2^16. If so, *segment
  // receives its full number.
  bool expects(std::uint16_t number, std::uint32_t* segment) const;
  // Records an arrived segment. Requires: expects() returned `segment`.
  void note_received(std::uint32_t segment, const SegmentHeader& header, bool written_directly);
  // Returns the count of released segments for the next message to the peer.
  std::uint32_t announce();
  // True if the peer should receive the count now, even without a segment in its direction, because
  // it waits for a credit or soon will.
  bool credit_due() const;

 private:
  // After this many unannounced releases the count is sent even if the sender still has credits, so
  // that it does not stall.
  static constexpr std::uint32_t kManyReleases = kVerbsDepth / 2;

  const std::uint32_t number_;
  ChannelOwner& link_;
  std::array<SegmentHeader, kVerbsDepth> headers_;    // by slot
  std::array<bool, kVerbsDepth> written_directly_{};  // by slot
  std::array<bool, kVerbsDepth> early_{};  // by slot: has arrived, but an earlier one has not
  Segment oldest_;
  std::uint32_t received_ = 0;
  std::uint32_t released_ = 0;
  std::uint32_t announced_ = 0;
};

}  // namespace pycoll::transport::verbs
