// Connected stream sockets for tests: a unix socket pair or a real TCP connection over loopback.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/unique_fd.h"
#include "tests/cpp/support/check.h"

namespace pycoll::testing {

enum class Medium { kUnixPair, kLoopback };

struct SocketPair {
  UniqueFd near;
  UniqueFd far;
};

inline SocketPair unix_pair() {
  int fds[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "%s", std::strerror(errno));
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Over a rail of this number: both ends have an address that those of other rails do not have.
inline SocketPair loopback_pair(int rail = 0) {
  const auto tcp_socket = [] {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(fd.valid(), "%s", std::strerror(errno));
    return fd;
  };
  const UniqueFd listener = tcp_socket();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + static_cast<std::uint32_t>(rail));
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t bytes = sizeof(address);
  CHECK(::bind(listener.get(), generic, bytes) == 0, "%s", std::strerror(errno));
  CHECK(::listen(listener.get(), 1) == 0, "%s", std::strerror(errno));
  CHECK(::getsockname(listener.get(), generic, &bytes) == 0, "%s", std::strerror(errno));
  SocketPair pair{tcp_socket(), UniqueFd()};
  CHECK(::connect(pair.near.get(), generic, bytes) == 0, "%s", std::strerror(errno));
  pair.far.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(pair.far.valid(), "%s", std::strerror(errno));
  return pair;
}

// Unix sockets have no rails.
inline SocketPair connected_pair(Medium medium, int rail = 0) {
  return medium == Medium::kUnixPair ? unix_pair() : loopback_pair(rail);
}

// The kernel rounds up to a minimum of its own, about 4.5 KiB.
inline void limit_send_buffer(const UniqueFd& fd, int bytes) {
  CHECK(::setsockopt(fd.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)) == 0, "%s",
        std::strerror(errno));
}

inline UniqueFd duplicate(const UniqueFd& fd) {
  UniqueFd copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  CHECK(copy.valid(), "%s", std::strerror(errno));
  return copy;
}

}  // namespace pycoll::testing
