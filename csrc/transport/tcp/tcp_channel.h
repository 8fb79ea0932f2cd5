// The channels of the TCP transport, as its users see them. A channel never touches a socket; it
// submits its segments to a stream (tcp_stream.h).
//
// Threads: those of the Transport. A link owns its channels and outlives every call to them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/capabilities.h"
#include "transport/tcp/tcp_segments.h"
#include "transport/tcp/tcp_stream.h"

namespace pycoll::transport {

class TcpSendChannel final : public SendChannel, private SourceRecord {
 public:
  // Both outlive the channel.
  TcpSendChannel(OutgoingSegments& segments, const TcpStreams& streams)
      : segments_(segments), streams_(streams) {}

  std::byte* reserve(std::size_t bytes) override;
  void commit(const SegmentHeader& header) override;
  bool hand_over(const SegmentHeader& header, const std::byte* data) override;
  // Also waits for committed segments: a rank that has finished an operation may not poll for long,
  // and bytes that the socket did not take would stay here.
  bool drained() override { return segments_.all_written(); }
  SendCapabilities capabilities() override { return {.sources = this}; }

 private:
  bool flushed() override { return drained(); }
  bool reads(const std::byte* data, std::size_t bytes) override {
    return segments_.reads(data, bytes);
  }
  void submit(const SegmentHeader& header, const std::byte* data);
  TcpStream& stream_for(std::size_t bytes);

  // Shorter segments use the home socket: reading another socket costs more than sending them.
  static constexpr std::size_t kStripedBytesMin = 16 * 1024;
  static constexpr std::size_t kNothing = ~std::size_t{0};

  OutgoingSegments& segments_;
  const TcpStreams& streams_;
  std::size_t reserved_bytes_ = kNothing;
  std::uint32_t striped_ = 0;  // segments that rotated over the sockets
};

class TcpRecvChannel final : public RecvChannel {
 public:
  // `streams` and the segments of channel `number` outlive the channel.
  TcpRecvChannel(std::uint32_t number, IncomingSegments& segments, const TcpStreams& streams)
      : number_(number), segments_(segments), streams_(streams) {}

  const Segment* peek() override { return segments_.oldest(); }
  void release() override;

 private:
  const std::uint32_t number_;
  IncomingSegments& segments_;
  const TcpStreams& streams_;
};

}  // namespace pycoll::transport
