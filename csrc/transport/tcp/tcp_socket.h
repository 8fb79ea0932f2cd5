// The kernel's view of one connected socket: options, and whether the host at the other end still
// answers. Also accepts unix stream sockets, which need neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/status.h"

namespace pycoll::transport {

// Makes `fd` non-blocking and sets options for latency, throughput and the detection of vanished
// hosts. An option that this kernel or kind of socket refuses keeps its default.
// Fails with kInvalidArgument and a reason if `fd` is not a connected stream socket.
Status prepare_socket(int fd);

// The addresses between which a socket is connected.
struct SocketEnds {
  struct End {
    std::string host;  // "10.0.0.2", "fd00::1"; empty where the socket has none
    int port = 0;
  };
  End near;  // of this process
  End far;

  bool known() const { return !near.host.empty() && !far.host.empty(); }
};
// Returns unknown ends for sockets other than TCP. IPv4 mapped into IPv6 is returned as IPv4.
SocketEnds ends_of(int fd);
// "10.0.0.2:4711 (here 10.0.0.1:39114)"; requires known ends.
std::string to_text(const SocketEnds& ends);

// Sends bytes that the kernel has accepted but may hold back. A write of more than one packet
// (64 KiB with segmentation offload) leaves a short remainder. Linux keeps it ("autocorking") until
// the packets before it have left the interface's queue, even with TCP_NODELAY. If several sockets
// share a slow interface, that queue also holds what they have sent since. Costs one system call.
void push(int fd);

// Bytes that the kernel has accepted but not yet sent even once; 0 if the kernel does not tell.
std::size_t unsent_bytes(int fd);

// Reads and drops pending input. Closing a socket with unread bytes would reset the connection and
// destroy bytes that the peer has not read yet.
void discard_input(int fd);

// The kernel's record of a peer host's silence.
struct Silence {
  bool unanswered = false;       // the kernel has retransmitted because no answer came
  Nanoseconds since_answer = 0;  // since the last acknowledgement of the peer's kernel
};

// All zero for a socket that keeps no such record.
Silence silence_of(int fd);

// Distinguishes a vanished host from a busy one. TCP_USER_TIMEOUT cannot: it also
// ends the connection to a live process that does not read for that long, as any
// rank does while it computes.
class VanishWatch {
 public:
  // A host without an answer for this long counts as gone.
  static constexpr Nanoseconds kPatience = 4'000'000'000;
  // The interval between two checks of the owner; each costs one system call per socket.
  static constexpr Nanoseconds kInterval = 1'000'000'000;

  // True once all checks during at least kPatience found `silence` unanswered and no
  // acknowledgement has arrived since.
  [[nodiscard]] bool has_vanished(const Silence& silence, Nanoseconds now);

 private:
  bool suspicious_ = false;
  Nanoseconds since_ = 0;
};

}  // namespace pycoll::transport
