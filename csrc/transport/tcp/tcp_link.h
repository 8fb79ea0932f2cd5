// Everything between this rank and one peer over TCP: one or more sockets, the channels, the
// notices (on socket 0), and the common state: open, closed or lost. Sockets between different
// pairs of addresses are different rails; long segments are striped over them (tcp_channel.h).
//
// Threads: those of the Transport, which owns the link.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/tcp/tcp_channel.h"
#include "transport/tcp/tcp_segments.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_stream.h"
#include "transport/transport.h"

namespace pycoll::transport {

class TcpLink final : public Link {
 public:
  // `address` names the peer if its sockets have no addresses. `epoll` and `turns`, see
  // TcpStreams, are borrowed and outlive the link.
  TcpLink(int peer, std::string address, int epoll, std::vector<WaitingSegment>* turns)
      : peer_(peer), address_(std::move(address)), epoll_(epoll) {
    streams_.turns = turns;
  }
  // Prepares the sockets. Called once; after a failure the link must not be used.
  Status open(std::vector<UniqueFd> sockets);

  SendChannel& send_channel(std::uint32_t number) override;
  RecvChannel& recv_channel(std::uint32_t number) override;
  void post(const Notice& notice) override;
  Notice newest() override { return notices_.newest; }
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // The functions below are for the transport.
  std::size_t stream_count() const { return sockets_.size(); }
  std::uint64_t notice_count() const { return notices_.arrived; }  // from the peer
  // Reads socket `index` and updates the link's state; true if anything changed.
  bool receive(std::size_t index);
  bool flush();
  [[nodiscard]] bool flush_unless_blocked();
  bool has_output() const;
  // The events that the epoll descriptor reports: none, input, or also that a socket accepts
  // pending output. The data of an event is peer << 8 | index of the socket.
  enum class Watch : std::uint8_t { kNothing, kInput, kBoth };
  // Fails with kTransport if the kernel refuses a socket; other sockets may have changed already.
  Status watch(Watch wanted);
  // Checks whether the peer's host still answers. Called every VanishWatch::kInterval.
  bool look_for_silence(Nanoseconds now);

  void let_go();

  // The four steps of an orderly end, in this order: queue a goodbye after all output; shut down
  // output; count the bytes that the kernel has not sent yet; close the sockets.
  void say_goodbye();
  void shut_output();
  std::size_t unsent() const;
  void close_sockets();

 private:
  // One socket with its stream and its watches.
  struct Socket {
    std::unique_ptr<TcpStream> stream;
    VanishWatch watch;
    std::uint32_t events = 0;  // reported by epoll; 0: the socket is not in the epoll set
  };

  void forget(Socket& socket) const;
  [[nodiscard]] bool conclude();
  void read_the_rest();

  const int peer_;
  const std::string address_;
  const int epoll_;
  NoticeBox notices_;
  LinkSegments segments_;
  TcpStreams streams_;
  std::array<std::optional<TcpSendChannel>, kChannelsMax> sends_;  // made on first use
  std::array<std::optional<TcpRecvChannel>, kChannelsMax> recvs_;
  std::vector<Socket> sockets_;
  LinkState state_ = LinkState::kOpen;
  std::string reason_;
};

}  // namespace pycoll::transport
