// The channels of the TCP transport: counters and staging. A channel never touches a socket; it
// tells a stream (tcp_stream.h), which frames and moves the bytes. Its segments may take several
// streams and so come out of order; both ends know them by their numbers. WIRE.md explains the
// credits.
//
// Threads: those of the Transport. A link owns its channels and outlives every call to them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "transport/frame.h"
#include "transport/transport.h"

namespace pycoll::transport {

class TcpStream;

// The sockets of a link, as its channels see them. A channel's home is the one of its number: its
// credits travel there, and its segments too, but for long ones of a link over several rails, which
// take all sockets in turn.
struct TcpStreams {
  std::vector<TcpStream*> all;
  bool striped = false;  // they lead over more than one rail

  TcpStream& home(std::uint32_t channel) const { return *all[channel % all.size()]; }
};

// Which segments of a channel are through, in whatever order they come to be.
class Tally {
 public:
  // Requires: fewer than kTcpDepth segments lie between this one and before(), and it is new.
  void add(std::uint32_t segment) {
    beyond_ |= bit(segment);
    for (; (beyond_ & bit(before_)) != 0; ++before_) beyond_ &= ~bit(before_);
  }
  // All segments before this one are through, and this one is not.
  std::uint32_t before() const { return before_; }
  // Requires: as for add().
  bool has(std::uint32_t segment) const { return (beyond_ & bit(segment)) != 0; }

 private:
  static std::uint32_t bit(std::uint32_t segment) { return 1u << segment % kTcpDepth; }
  static_assert(kTcpDepth <= 32 && (kTcpDepth & (kTcpDepth - 1)) == 0, "numbers wrap around");

  std::uint32_t before_ = 0;
  std::uint32_t beyond_ = 0;
};

// kTcpDepth rooms of kSegmentBytesMax, 64-byte aligned; memory comes with the first at(). In front
// of each is place for a frame's header, so that a frame can be read in one piece.
class StagingSlots {
 public:
  // Requires: room < kTcpDepth.
  std::byte* at(std::uint32_t room);

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

// Which rooms hold nothing. The one that was given back last is taken first: it lies in the cache.
class FreeRooms {
 public:
  FreeRooms() {
    for (std::uint32_t room = 0; room < kTcpDepth; ++room) give_back(kTcpDepth - 1 - room);
  }
  std::size_t count() const { return count_; }
  // The one that take() gives after `others` more. Requires: others < count().
  std::uint8_t next(std::size_t others) const { return rooms_[count_ - 1 - others]; }
  // Requires: fewer than kTcpDepth are taken.
  std::uint8_t take() { return rooms_[--count_]; }
  void give_back(std::uint32_t room) { rooms_[count_++] = static_cast<std::uint8_t>(room); }

 private:
  std::array<std::uint8_t, kTcpDepth> rooms_ = {};
  std::size_t count_ = 0;
};

// Counters run from zero without end, modulo 2^32:
//   released <= written.before() <= committed <= released + kTcpDepth
class TcpSendChannel final : public SendChannel {
 public:
  // `streams` outlives the channel.
  TcpSendChannel(std::uint32_t number, const TcpStreams& streams)
      : number_(number), streams_(streams) {}

  std::byte* reserve(std::size_t bytes) override;
  void commit(const SegmentHeader& header) override;
  bool hand_over(const SegmentHeader& header, const std::byte* data) override;
  // Waits for committed segments too: a rank that is done with an operation may not poll for long,
  // and what the socket did not take would stay here.
  bool drained() override { return written_.before() == committed_; }
  bool reads(const std::byte* data, std::size_t bytes) override;

  // --- for the streams
  std::uint32_t number() const { return number_; }
  // Its memory stays until written(). Requires: it was submitted to a stream and is not written.
  const Segment& at(std::uint32_t segment) const { return segments_[segment % kTcpDepth]; }
  // The kernel has taken that segment whole, or it will never leave: its memory is free.
  void written(std::uint32_t segment) { written_.add(segment); }
  // The peer's counter of released segments; false when it counts what was never sent.
  [[nodiscard]] bool accept_released(std::uint8_t released);
  // Moves what is not yet written into the slots, so that the user's memory is free.
  void let_go();

 private:
  bool full() const { return committed_ - released_ == kTcpDepth; }
  void submit(const SegmentHeader& header, const std::byte* data);
  TcpStream& stream_for(std::size_t bytes);

  // Shorter segments stay at home: to look at another socket takes longer than to carry them.
  static constexpr std::size_t kStripedBytesMin = 16 * 1024;

  const std::uint32_t number_;
  const TcpStreams& streams_;
  std::array<Segment, kTcpDepth> segments_;
  StagingSlots slots_;
  std::size_t reserved_bytes_ = kNothing;
  std::uint32_t committed_ = 0;
  std::uint32_t released_ = 0;
  Tally written_;
  std::uint32_t striped_ = 0;  // segments that took the sockets in turn

  static constexpr std::size_t kNothing = ~std::size_t{0};
};

// announced <= released <= received.before() <= announced + kTcpDepth
class TcpRecvChannel final : public RecvChannel {
 public:
  // `streams` outlives the channel.
  TcpRecvChannel(std::uint32_t number, const TcpStreams& streams)
      : number_(number), streams_(streams) {}

  const Segment* peek() override;
  void release() override;

  // --- for the streams
  // Where the payload of the segment that begins to arrive goes, which has this number modulo
  // 2^16; nullptr when it began before, or the peer's credits do not allow it.
  [[nodiscard]] std::byte* begin(const SegmentHeader& header, std::uint16_t segment);
  // Where payloads of segments to come will go that begin in this order, each behind place for a
  // frame's header; how many are known, up to `places`. Nobody has that memory until then.
  template <std::size_t places>
  std::size_t foresee(std::array<std::byte*, places>* payloads) {
    const std::size_t known = std::min(places, free_.count());
    for (std::size_t i = 0; i < known; ++i) (*payloads)[i] = slots_.at(free_.next(i));
    return known;
  }
  // That payload has arrived whole. Requires: it began.
  void complete(std::uint16_t segment);
  // The counter that travels to the peer in the next frame of the home stream.
  std::uint8_t announce();

 private:
  // True when the peer should be told now, even if no data goes its way: it may be waiting for
  // room, or would be soon.
  bool credit_due() const;
  // The number of which this is the rest, of a segment that the peer may know to have room.
  std::uint32_t number_of(std::uint16_t segment) const {
    return announced_ +
           static_cast<std::uint16_t>(segment - static_cast<std::uint16_t>(announced_));
  }
  // So many untold releases are told even to a sender that still has room, to keep it going; fewer
  // wait for data that goes its way.
  static constexpr std::uint32_t kManyReleases = kTcpDepth * 3 / 4;

  const std::uint32_t number_;
  const TcpStreams& streams_;
  std::array<SegmentHeader, kTcpDepth> headers_;
  StagingSlots slots_;
  FreeRooms free_;
  std::array<std::uint8_t, kTcpDepth> rooms_ = {};  // of segments that have begun
  Segment oldest_;
  Tally received_;
  std::array<bool, kTcpDepth> begun_ = {};  // and not released
  std::uint32_t released_ = 0;
  std::uint32_t announced_ = 0;
};

// All channels of a link, each made on first use; shared by the link and its streams.
class TcpChannels {
 public:
  // Requires: number < kChannelsMax; the sockets are all known.
  TcpSendChannel& send(std::uint32_t number);
  TcpRecvChannel& recv(std::uint32_t number);
  // nullptr for one that was never used.
  TcpSendChannel* used_send(std::uint32_t number) const { return send_[number].get(); }
  TcpRecvChannel* used_recv(std::uint32_t number) const { return recv_[number].get(); }
  void let_go();

  TcpStreams streams;

 private:
  std::array<std::unique_ptr<TcpSendChannel>, kChannelsMax> send_;
  std::array<std::unique_ptr<TcpRecvChannel>, kChannelsMax> recv_;
};

}  // namespace pycoll::transport
