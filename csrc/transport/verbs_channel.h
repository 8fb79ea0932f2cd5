// The channels of the verbs transport: counters over slots of registered memory. A channel posts
// nothing itself; it tells its link (verbs_link.h). VERBS.md explains the credits.
//
// Threads: those of the Transport. A link owns its channels and outlives every call to them.
#pragma once

#include <array>
#include <cstdint>

#include "transport/verbs_layout.h"
#include "transport/verbs_rail.h"

namespace pycoll::transport::verbs {

class VerbsLink;

// Counters run from zero without end, modulo 2^32:
//   released <= posted <= committed <= released + kVerbsDepth
// A slot is used again when its segment was released and the device reads it no more. Either may
// come first: the peer's word can overtake the acknowledgement that lets the device forget.
//
// A payload from registered memory is sent from there, and one that is placed goes to the peer's
// region: of its slot only the header is used.
class VerbsSendChannel final : public SendChannel {
 public:
  // Rooms lie in the outgoing areas of the link's rails, once it has some.
  VerbsSendChannel(std::uint32_t number, VerbsLink& link) : number_(number), link_(link) {}

  std::byte* reserve(std::size_t bytes) override;
  void commit(const SegmentHeader& header) override;
  bool hand_over(const SegmentHeader& header, const std::byte* data) override;
  // What may be sent from where it lies; whoever combines into such memory then need not copy.
  bool lendable(const std::byte* data, std::size_t bytes, bool fresh) override;
  // What is lent is handed over: the device reads it, and tells when it has.
  bool lend(const SegmentHeader& header, const std::byte* data) override {
    return hand_over(header, data);
  }
  bool pass(const SegmentHeader& header, const Passage& passage) override;
  // Waits also for segments that the device has not got yet, since their owner may not poll for
  // long.
  bool drained() override;
  bool flushed() override;
  bool reads(const std::byte* data, std::size_t bytes) override;

  // --- for the link
  std::uint32_t number() const { return number_; }
  std::uint32_t next() const { return posted_; }
  // Where the payload of the next segment comes from and goes to, apart from its slots.
  struct Course {
    const std::byte* source = nullptr;  // nullptr: its slot
    std::uint32_t key = 0;
    bool in_region = false;  // the source
    std::uint64_t to = Passage::kRoom;
  };
  Course course() const;
  // The next segment was given to the device, which reads its slot and source until `position` is
  // done.
  void posted(std::uint64_t position);
  // The peer's count of released segments, of which `bits` bits travelled. False when it counts
  // what was never sent.
  [[nodiscard]] bool accept_released(std::uint32_t released, int bits);
  // Whether the device of this rail may be reading memory of users, as of the last flushed().
  bool reads_over(const Rail& rail) const;
  // Nothing leaves any more.
  void abandon();
  // Moves payloads that the device has not got into their slots, so that the user's memory is free.
  void let_go();

 private:
  static constexpr std::size_t kNothing = ~std::size_t{0};
  // A position that is never done.
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  // Less is copied: that takes no longer than the device takes to tell that it has read.
  static constexpr std::size_t kStraightBytesMin = 16 * 1024;

  // Memory outside of the slots that the device reads, or will.
  struct Source {
    const std::byte* data = nullptr;  // nullptr: there is none
    std::size_t bytes = 0;
    Registration* registration = nullptr;  // of users' memory; nullptr: it is the region's
  };

  [[nodiscard]] Registration* acquire(const std::byte* data, std::size_t bytes) const;
  bool has_room();
  void set_source(const Source& source);
  void submit(const SegmentHeader& header, std::uint64_t to = Passage::kRoom);
  void settle();
  void drop(std::uint32_t segment);

  const std::uint32_t number_;
  VerbsLink& link_;
  std::array<std::uint64_t, kVerbsDepth> free_at_{};  // position by slot
  std::array<Source, kVerbsDepth> sources_;           // by slot
  std::array<std::uint64_t, kVerbsDepth> targets_{};  // by slot, as in Passage
  int source_count_ = 0;
  std::size_t reserved_bytes_ = kNothing;
  std::uint32_t committed_ = 0;
  std::uint32_t posted_ = 0;
  std::uint32_t released_ = 0;
  bool abandoned_ = false;
};

// announced <= released <= received <= announced + kVerbsDepth
// Segments that take different rails come in any order: those before number `received` are all
// there, of the later ones some may be.
class VerbsRecvChannel final : public RecvChannel {
 public:
  // Segments lie in the incoming areas of the link's rails, once it has some.
  VerbsRecvChannel(std::uint32_t number, VerbsLink& link) : number_(number), link_(link) {}

  const Segment* peek() override;
  void release() override;

  // --- for the link
  // Whether the peer may send a segment whose number is `number` modulo 2^16; if so, which one.
  bool expects(std::uint16_t number, std::uint32_t* segment) const;
  // Requires: expects() gave `segment`.
  void received(std::uint32_t segment, const SegmentHeader& header, bool placed);
  // The counter that travels to the peer with the next message.
  std::uint32_t announce();
  // True when the peer should be told now, even if no segment goes its way: it may be waiting for
  // room, or would be soon.
  bool credit_due() const;

 private:
  // So many untold releases are told even to a sender that still has room, to keep it going.
  static constexpr std::uint32_t kManyReleases = kVerbsDepth / 2;

  const std::uint32_t number_;
  VerbsLink& link_;
  std::array<SegmentHeader, kVerbsDepth> headers_;  // by slot
  std::array<bool, kVerbsDepth> placed_{};          // by slot
  std::array<bool, kVerbsDepth> early_{};           // by slot: there, but not one before it
  Segment oldest_;
  std::uint32_t received_ = 0;
  std::uint32_t released_ = 0;
  std::uint32_t announced_ = 0;
};

}  // namespace pycoll::transport::verbs
