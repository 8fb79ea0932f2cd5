// A peer made by hand: the test writes and reads the bytes of the wire itself, and the transport
// under test (rank 0 of 2) sits at the other end.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/socket_pairs.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/tcp.h"
#include "transport/tcp/tcp_socket.h"

namespace pycoll::testing {

using transport::FrameHeader;
using transport::FrameType;
using transport::kTcpDepth;

struct Frame {
  FrameHeader header;
  std::vector<std::byte> payload;
};

class RawPeer {
 public:
  // Over loopback, socket i takes rail i % rails.
  explicit RawPeer(int sockets = 1, Medium medium = Medium::kUnixPair, int rails = 1)
      : transport_(std::make_unique<transport::TcpTransport>(0, 2)), ends_(sockets) {
    std::vector<UniqueFd> near;
    for (End& end : ends_) {
      SocketPair pair = connected_pair(medium, static_cast<int>(near.size()) % rails);
      const transport::SocketEnds ends = transport::ends_of(pair.near.get());
      end.name = ends.known() ? transport::to_text(ends) : "10.0.0.2:4711";
      near.push_back(std::move(pair.near));
      end.socket = std::move(pair.far);
    }
    const Status status = transport_->attach(1, std::move(near), "10.0.0.2:4711");
    CHECK(status.ok(), "%s", status.message().c_str());
  }

  transport::TcpTransport& transport() { return *transport_; }
  transport::Link& link() { return *transport_->link(1); }
  int fd(int socket = 0) { return end(socket).socket.get(); }
  // What the transport calls this end of that socket.
  const std::string& name(int socket = 0) { return end(socket).name; }

  // Frames with the right number and check, unless `change` spoils them.
  static FrameHeader data(std::uint32_t channel, std::uint32_t bytes, std::uint64_t sequence = 1) {
    FrameHeader header;
    header.type = FrameType::kData;
    header.channel = static_cast<std::uint8_t>(channel);
    header.bytes = bytes;
    header.sequence = sequence;
    return header;
  }
  static FrameHeader control(FrameType type) {
    FrameHeader header;
    header.type = type;
    header.bytes = type == FrameType::kNotice ? sizeof(transport::Notice) : 0;
    return header;
  }

  // Numbers and checks `header`, then sends it with a payload of header.bytes that counts up.
  void send(FrameHeader header, int socket = 0) {
    finish(&header, socket);
    send_finished(header, socket);
  }
  // The same for a segment of any number.
  void send_segment(FrameHeader header, std::uint32_t segment, int socket = 0) {
    header.segment = static_cast<std::uint16_t>(segment);
    seal(&header, socket);
    send_finished(header, socket);
  }
  void send_finished(const FrameHeader& header, int socket = 0) {
    send_bytes(&header, sizeof(header), socket);
    const std::vector<std::byte> payload = payload_of(header);
    send_bytes(payload.data(), payload.size(), socket);
  }
  void finish(FrameHeader* header, int socket = 0) {
    if (header->type == FrameType::kData && header->channel < transport::kChannelsMax) {
      header->segment = segments_[header->channel]++;
    }
    seal(header, socket);
  }
  void seal(FrameHeader* header, int socket = 0) {
    header->number = end(socket).sent++;
    header->check = transport::frame_check(*header);
  }
  static std::vector<std::byte> payload_of(const FrameHeader& header) {
    std::vector<std::byte> payload(header.bytes);
    for (std::size_t i = 0; i < payload.size(); ++i) {
      payload[i] = static_cast<std::byte>(i * 7 + header.sequence);
    }
    return payload;
  }
  // Writes all of it, polling the transport whenever the socket is full.
  void send_bytes(const void* data, std::size_t bytes, int socket = 0) {
    const auto* cursor = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t sent = ::send(fd(socket), cursor, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) {
        CHECK(transport_->poll(), "the transport reads nothing, %zu bytes wait", bytes);
        continue;
      }
      CHECK(sent > 0, "send: %s", std::strerror(errno));
      cursor += sent;
      bytes -= static_cast<std::size_t>(sent);
    }
  }

  // All frames that the transport has sent on `socket`, as far as they are whole.
  std::vector<Frame> take_frames(int socket = 0) {
    End& from = end(socket);
    char chunk[65536];
    for (ssize_t got; (got = ::recv(from.socket.get(), chunk, sizeof(chunk), MSG_DONTWAIT)) > 0;) {
      from.input.insert(from.input.end(), chunk, chunk + got);
      transport_->poll();
    }
    std::vector<Frame> frames;
    while (from.input.size() >= sizeof(FrameHeader)) {
      Frame frame;
      std::memcpy(&frame.header, from.input.data(), sizeof(FrameHeader));
      const transport::FrameFault fault = transport::judge(frame.header, from.read);
      CHECK(fault == transport::FrameFault::kNone, "the transport sent: %s",
            transport::to_text(fault, frame.header, from.read).c_str());
      const std::size_t whole = sizeof(FrameHeader) + frame.header.bytes;
      if (from.input.size() < whole) break;
      ++from.read;
      frame.payload.resize(frame.header.bytes);
      for (std::size_t i = 0; i < frame.payload.size(); ++i) {
        frame.payload[i] = static_cast<std::byte>(from.input[sizeof(FrameHeader) + i]);
      }
      from.input.erase(from.input.begin(), from.input.begin() + static_cast<std::ptrdiff_t>(whole));
      frames.push_back(std::move(frame));
    }
    return frames;
  }

  void hang_up(int socket = 0) { end(socket).socket.reset(); }
  void poll(int times = 30) {
    for (int i = 0; i < times; ++i) transport_->poll();
  }

 private:
  struct End {
    UniqueFd socket;
    std::string name;
    std::uint32_t sent = 0;
    std::uint32_t read = 0;
    std::vector<char> input;
  };
  End& end(int socket) { return ends_[static_cast<std::size_t>(socket)]; }

  std::unique_ptr<transport::TcpTransport> transport_;
  std::vector<End> ends_;
  std::array<std::uint16_t, transport::kChannelsMax> segments_{};
};

}  // namespace pycoll::testing
