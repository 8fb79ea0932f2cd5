// What the TCP transport asks of the kernel about one connected socket: options, and whether the
// host at the other end still answers. Works on unix stream sockets too, which need none of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/status.h"

namespace pycoll::transport {

// Makes `fd` non-blocking and sets what helps latency, throughput and the detection of vanished
// hosts; options that this kernel or kind of socket refuses keep their defaults.
// Fails with kInvalidArgument, naming the reason, when `fd` is no connected stream socket.
Status prepare_socket(int fd);

// The addresses between which a socket is connected.
struct SocketEnds {
  struct End {
    std::string host;  // "10.0.0.2", "fd00::1"; empty where the socket has none
    int port = 0;
  };
  End near;  // this process's
  End far;

  bool known() const { return !near.host.empty() && !far.host.empty(); }
};
// Nothing is known of sockets other than TCP's. IPv4 in IPv6 is told as IPv4.
SocketEnds ends_of(int fd);
// "10.0.0.2:4711 (here 10.0.0.1:39114)"; requires known ends.
std::string to_text(const SocketEnds& ends);

// Sends what the kernel has accepted and may hold back. A write of more than one packet's worth
// (64 KiB with segmentation offload) leaves a short rest, and Linux keeps that ("autocorking")
// until the packets before it have left the interface's queue, whatever TCP_NODELAY says: where
// several sockets share a slow interface, behind all that they have queued since. Costs one system
// call.
void push(int fd);

// Bytes that the kernel has accepted but not yet sent even once; 0 where it does not say.
std::size_t unsent_bytes(int fd);

// Reads and drops what has arrived: closing a socket with unread bytes resets the connection, and
// with it what the peer has not read yet.
void discard_input(int fd);

// What the kernel knows about the silence of a peer's host.
struct Silence {
  bool unanswered = false;       // something was sent again because no answer came
  Nanoseconds since_answer = 0;  // since the peer's kernel acknowledged anything
};

// All zero for sockets that cannot know.
Silence silence_of(int fd);

// Tells a vanished host from one that is only busy. TCP_USER_TIMEOUT cannot: it also ends the
// connection to a live process that does not read for that long, as any rank that computes.
class VanishWatch {
 public:
  // Without an answer for this long a host counts as gone.
  static constexpr Nanoseconds kPatience = 4'000'000'000;
  // How often the owner should look; costs one system call per socket.
  static constexpr Nanoseconds kInterval = 1'000'000'000;

  // True once every look in at least kPatience found `silence` unanswered and no answer came since.
  [[nodiscard]] bool vanished(const Silence& silence, Nanoseconds now);

 private:
  bool suspicious_ = false;
  Nanoseconds since_ = 0;
};

}  // namespace pycoll::transport
