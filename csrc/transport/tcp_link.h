// Everything between this rank and one peer over TCP: one or more sockets, channels, notices on
// socket 0, and the judgement over all of them: open, closed or lost. Sockets between different
// pairs of addresses are different rails, over which long segments are spread (tcp_channel.h).
//
// Threads: those of the Transport, which owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/tcp_socket.h"
#include "transport/tcp_stream.h"
#include "transport/transport.h"

namespace pycoll::transport {

class TcpLink final : public Link {
 public:
  // `address` names the peer where sockets have no addresses. `epoll` is borrowed and outlives the
  // link.
  TcpLink(int peer, std::string address, int epoll)
      : peer_(peer), address_(std::move(address)), epoll_(epoll) {}
  // Prepares the sockets. Called once; no link after a failure.
  Status open(std::vector<UniqueFd> sockets);

  int peer() const override { return peer_; }
  SendChannel& send_channel(std::uint32_t number) override;
  RecvChannel& recv_channel(std::uint32_t number) override;
  void post(const Notice& notice) override;
  Notice newest() override { return notices_.newest; }
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // --- for the transport
  std::size_t stream_count() const { return lines_.size(); }
  std::uint64_t notice_count() const { return notices_.arrived; }  // from the peer
  // Reads socket `index` and concludes; true if anything changed.
  bool receive(std::size_t index);
  bool flush();
  [[nodiscard]] bool flush_unless_blocked();
  bool has_output() const;
  // What the epoll descriptor is to tell of: input, and also that a socket takes pending output.
  // Its events have peer << 8 | index of the socket as their data.
  enum class Watch : std::uint8_t { kNothing, kInput, kBoth };
  // kTransport if the kernel refuses, with some sockets as they were.
  Status watch(Watch wanted);
  // Looks whether the peer's host still answers; to be called every VanishWatch::kInterval.
  bool look_for_silence(Nanoseconds now);

  void let_go();

  // Orderly end, in this order: goodbye behind all output; no more output; bytes that the kernel
  // has not sent yet; the sockets closed.
  void say_goodbye();
  void shut_output();
  std::size_t unsent() const;
  void close_sockets();

 private:
  // One socket and what is known about it.
  struct Line {
    std::unique_ptr<TcpStream> stream;
    VanishWatch watch;
    std::uint32_t events = 0;  // of which epoll tells; 0: it does not know the socket
  };

  void forget(Line& line) const;
  [[nodiscard]] bool conclude();
  void read_the_rest();

  const int peer_;
  const std::string address_;
  const int epoll_;
  NoticeBox notices_;
  TcpChannels channels_;
  std::vector<Line> lines_;
  LinkState state_ = LinkState::kOpen;
  std::string reason_;
};

}  // namespace pycoll::transport
