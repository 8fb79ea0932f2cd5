// Worlds of TCP transports in one process, over loopback connections or unix socket pairs.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/socket_pairs.h"
#include "tests/cpp/transport/conformance/transport_conformance.h"
#include "transport/tcp/tcp.h"

namespace pycoll::testing {

struct TcpSockets {
  Medium medium;
  int per_peer;
  int buffer_bytes;  // bounds the kernel's send buffer; 0 leaves it as it is
  int rails = 1;
};

class TcpFixture : public conformance::Fixture {
 public:
  TcpFixture(int size, TcpSockets sockets) : sockets_(sockets) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back({std::make_unique<transport::TcpTransport>(rank, size), {}});
    }
    for (int rank = 0; rank < size; ++rank) {
      for (int peer = 0; peer < rank; ++peer) connect(rank, peer);
    }
  }

  transport::Transport& at(int rank) override {
    return *ranks_[static_cast<std::size_t>(rank)].transport;
  }
  std::uint64_t depth() const override { return transport::kTcpDepth; }
  // The kernel does the same with the sockets of a killed process.
  void kill(int rank) override {
    for (const UniqueFd& fd : ranks_[static_cast<std::size_t>(rank)].sockets) {
      CHECK(::shutdown(fd.get(), SHUT_RDWR) == 0 || errno == ENOTCONN, "cannot shut socket %d",
            fd.get());
    }
  }

 private:
  struct Rank {
    std::unique_ptr<transport::TcpTransport> transport;
    std::vector<UniqueFd> sockets;  // duplicates, for kill()
  };

  void connect(int rank, int peer) {
    std::vector<UniqueFd> near;
    std::vector<UniqueFd> far;
    for (int i = 0; i < sockets_.per_peer; ++i) {
      auto pair = connected_pair(sockets_.medium, i % sockets_.rails);
      if (sockets_.buffer_bytes != 0) {
        limit_send_buffer(pair.near, sockets_.buffer_bytes);
        limit_send_buffer(pair.far, sockets_.buffer_bytes);
      }
      ranks_[static_cast<std::size_t>(rank)].sockets.push_back(duplicate(pair.near));
      ranks_[static_cast<std::size_t>(peer)].sockets.push_back(duplicate(pair.far));
      near.push_back(std::move(pair.near));
      far.push_back(std::move(pair.far));
    }
    attach(rank, peer, std::move(near));
    attach(peer, rank, std::move(far));
  }

  void attach(int rank, int peer, std::vector<UniqueFd> sockets) {
    const Status status = ranks_[static_cast<std::size_t>(rank)].transport->attach(
        peer, std::move(sockets), "rank " + std::to_string(peer));
    CHECK(status.ok(), "%s", status.message().c_str());
  }

  TcpSockets sockets_;
  std::vector<Rank> ranks_;
};

inline conformance::Medium tcp_medium(const char* prefix, TcpSockets sockets) {
  const auto make = [sockets](int size, std::uint64_t) {
    return std::make_unique<TcpFixture>(size, sockets);
  };
  return {prefix, true, make, {.sources = true, .output = true}, 5};
}

}  // namespace pycoll::testing
