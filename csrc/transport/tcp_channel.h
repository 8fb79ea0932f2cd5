// The channels of the TCP transport: counters and staging. A channel never touches its socket; it
// tells its stream (tcp_stream.h), which frames and moves the bytes. WIRE.md explains the credits.
//
// Threads: those of the Transport. A stream owns its channels and outlives every call to them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "transport/transport.h"

namespace pycoll::transport {

class TcpStream;

// kTcpDepth rooms of kSegmentBytesMax, 64-byte aligned; memory comes with the first at().
class StagingSlots {
 public:
  std::byte* at(std::uint32_t segment);

 private:
  static constexpr std::align_val_t kAlignment{64};
  // Not a multiple of 4096: neighbouring slots would share their cache sets.
  static constexpr std::size_t kStride = kSegmentBytesMax + 320;
  static_assert(kStride % static_cast<std::size_t>(kAlignment) == 0 && kStride % 4096 != 0);

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, kAlignment); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
};

// Counters run from zero without end, modulo 2^32:
//   released <= written <= staged <= committed <= released + kTcpDepth
class TcpSendChannel final : public SendChannel {
 public:
  TcpSendChannel(std::uint32_t number, TcpStream& stream) : number_(number), stream_(stream) {}

  std::byte* reserve(std::size_t bytes) override;
  void commit(const SegmentHeader& header) override;
  bool hand_over(const SegmentHeader& header, const std::byte* data) override;
  // Waits for committed segments too: a rank that is done with an operation may not poll for long,
  // and what the socket did not take would stay here.
  bool drained() override { return written_ == committed_; }
  bool reads(const std::byte* data, std::size_t bytes) override;

  // --- for the stream
  std::uint32_t number() const { return number_; }
  // The oldest segment that is not yet in a frame; its memory stays until written().
  // Requires: one was announced to the stream.
  const Segment& stage();
  // The kernel has taken the oldest staged segment whole.
  void written() { ++written_; }
  // The peer's counter of released segments; false when it counts what was never sent.
  bool accept_released(std::uint8_t released);
  // No byte will leave any more; the user's memory is free.
  void abandon();
  // Moves what is not yet written into the slots, so that the user's memory is free.
  void let_go();
  // The segment `index` places behind the oldest unwritten one. Requires: it was committed.
  const Segment& unwritten(std::uint32_t index) const {
    return segments_[(written_ + index) % kTcpDepth];
  }

 private:
  bool full() const { return committed_ - released_ == kTcpDepth; }
  void submit(const SegmentHeader& header, const std::byte* data);

  const std::uint32_t number_;
  TcpStream& stream_;
  std::array<Segment, kTcpDepth> segments_;
  StagingSlots slots_;
  std::size_t reserved_bytes_ = kNothing;
  std::uint32_t committed_ = 0;
  std::uint32_t staged_ = 0;
  std::uint32_t written_ = 0;
  std::uint32_t released_ = 0;
  bool abandoned_ = false;

  static constexpr std::size_t kNothing = ~std::size_t{0};
};

// announced <= released <= received <= announced + kTcpDepth
class TcpRecvChannel final : public RecvChannel {
 public:
  explicit TcpRecvChannel(TcpStream& stream) : stream_(stream) {}

  const Segment* peek() override;
  void release() override;

  // --- for the stream
  // Where the payload of the segment that begins to arrive goes; nullptr when the peer sends more
  // than its credits allow.
  std::byte* begin(const SegmentHeader& header);
  // That payload has arrived whole.
  void complete() { ++received_; }
  // The counter that travels to the peer in the next frame.
  std::uint8_t announce();
  // True when the peer should be told now, even if no data goes its way: it may be waiting for
  // room, or would be soon.
  bool credit_due() const;

 private:
  // So many untold releases are told even to a sender that still has room, to keep it going.
  static constexpr std::uint32_t kManyReleases = kTcpDepth / 2;

  TcpStream& stream_;
  std::array<SegmentHeader, kTcpDepth> headers_;
  StagingSlots slots_;
  Segment oldest_;
  std::uint32_t received_ = 0;
  std::uint32_t released_ = 0;
  std::uint32_t announced_ = 0;
};

}  // namespace pycoll::transport
