#include "transport/tcp/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

namespace pycoll::transport {
namespace {

// With these values the kernel ends an idle connection to a vanished host after 2 + 3 * 1 seconds.
constexpr int kKeepIdleSeconds = 2;
constexpr int kKeepIntervalSeconds = 1;
constexpr int kKeepProbes = 3;

// Linux 6.15 and later: bounds the pause between two retransmissions, so that a host that vanishes
// while its window is closed is detected as fast as any other. Not yet in the C library's headers.
constexpr int kTcpRtoMaxMs = 44;
constexpr int kRtoMaxMs = 1000;

// Best effort: a refused option keeps its default.
void try_option(int fd, int level, int name, int value) {
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

int int_option(int fd, int level, int name) {
  int value = -1;
  socklen_t bytes = sizeof(value);
  return ::getsockopt(fd, level, name, &value, &bytes) == 0 ? value : -1;
}

bool is_tcp(int fd) {
  const int domain = int_option(fd, SOL_SOCKET, SO_DOMAIN);
  return domain == AF_INET || domain == AF_INET6;
}

std::string text_of(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = {};
  return ::inet_ntop(family, address, text, sizeof(text)) == nullptr ? "" : text;
}

SocketEnds::End end_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    sockaddr_in four;
    std::memcpy(&four, &address, sizeof(four));
    return {text_of(AF_INET, &four.sin_addr), ntohs(four.sin_port)};
  }
  if (address.ss_family != AF_INET6) return {};
  sockaddr_in6 six;
  std::memcpy(&six, &address, sizeof(six));
  const bool mapped = IN6_IS_ADDR_V4MAPPED(&six.sin6_addr);
  return {mapped ? text_of(AF_INET, six.sin6_addr.s6_addr + 12) : text_of(AF_INET6, &six.sin6_addr),
          ntohs(six.sin6_port)};
}

std::string to_text(const SocketEnds::End& end) {
  const bool six = end.host.find(':') != std::string::npos;
  return (six ? "[" + end.host + "]" : end.host) + ":" + std::to_string(end.port);
}

// Replaces bbr, which paces for the internet and is slow on loopback and local networks. The
// creator of a socket should choose before it connects: a socket that began with bbr keeps pacing
// by timers even after this call.
void choose_congestion_control(int fd) {
  char name[16] = {};
  socklen_t bytes = sizeof(name) - 1;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) != 0) return;
  const std::string_view current = name;
  if (current == "cubic" || current == "dctcp") return;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
}

}  // namespace

Status prepare_socket(int fd) {
  const auto refuse = [&](const std::string& why) {
    return Status::error(Code::kInvalidArgument, "descriptor " + std::to_string(fd) + " " + why +
                                                     "; a connected stream socket is needed");
  };
  const int type = int_option(fd, SOL_SOCKET, SO_TYPE);
  if (type < 0) return refuse(std::string("is no socket: ") + std::strerror(errno));
  if (type != SOCK_STREAM) return refuse("is a socket of another type");
  sockaddr_storage peer{};
  socklen_t bytes = sizeof(peer);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0) {
    return refuse(std::string("is not connected: ") + std::strerror(errno));
  }
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return refuse(std::string("cannot be made non-blocking: ") + std::strerror(errno));
  }
  if (!is_tcp(fd)) return {};
  try_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  try_option(fd, IPPROTO_TCP, TCP_QUICKACK, 1);
  try_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  try_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleSeconds);
  try_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalSeconds);
  try_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepProbes);
  try_option(fd, IPPROTO_TCP, kTcpRtoMaxMs, kRtoMaxMs);
  choose_congestion_control(fd);
  return {};
}

SocketEnds ends_of(int fd) {
  const auto end = [fd](auto ask) {
    sockaddr_storage address{};
    socklen_t bytes = sizeof(address);
    const bool told = ask(fd, reinterpret_cast<sockaddr*>(&address), &bytes) == 0;
    return told ? end_of(address) : SocketEnds::End{};
  };
  return {end(::getsockname), end(::getpeername)};
}

std::string to_text(const SocketEnds& ends) {
  return to_text(ends.far) + " (here " + to_text(ends.near) + ")";
}

void push(int fd) {
  // Setting the option again also sends pending bytes.
  try_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

std::size_t unsent_bytes(int fd) {
  int bytes = 0;
  if (!is_tcp(fd) || ::ioctl(fd, SIOCOUTQNSD, &bytes) != 0) return 0;
  return static_cast<std::size_t>(bytes);
}

void discard_input(int fd) {
  char scratch[16 * 1024];
  constexpr int kRounds = 1024;  // bounded, because a peer may keep sending
  for (int i = 0; i < kRounds; ++i) {
    if (::recv(fd, scratch, sizeof(scratch), MSG_DONTWAIT) <= 0) return;
  }
}

Silence silence_of(int fd) {
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return {};
  Silence silence;
  silence.unanswered = info.tcpi_retransmits > 0 || info.tcpi_probes > 0;
  silence.since_answer = static_cast<Nanoseconds>(info.tcpi_last_ack_recv) * 1'000'000;
  return silence;
}

bool VanishWatch::has_vanished(const Silence& silence, Nanoseconds now) {
  if (!silence.unanswered) {
    suspicious_ = false;
    return false;
  }
  if (!suspicious_) {
    suspicious_ = true;
    since_ = now;
  }
  return now - since_ >= kPatience && silence.since_answer >= kPatience;
}

}  // namespace pycoll::transport
