// The transport contract over TCP: on loopback connections and on unix socket pairs, with one
// socket per peer and with several, over one rail and over several, and with kernel buffers so
// small that every segment moves in pieces. What is particular to TCP is in tcp_test.cpp.
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/support/socket_pairs.h"
#include "tests/cpp/transport/conformance/transport_conformance.h"
#include "transport/tcp/tcp.h"

namespace pycoll::conformance {
namespace {

using transport::TcpTransport;

struct Sockets {
  testing::Medium medium;
  int per_peer;
  int buffer_bytes;  // bounds the kernel's send buffer; 0 leaves it as it is
  int rails = 1;
};

class TcpFixture : public Fixture {
 public:
  TcpFixture(int size, Sockets sockets) : sockets_(sockets) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back({std::make_unique<TcpTransport>(rank, size), {}});
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
    std::unique_ptr<TcpTransport> transport;
    std::vector<UniqueFd> sockets;  // duplicates, for kill()
  };

  void connect(int rank, int peer) {
    std::vector<UniqueFd> near;
    std::vector<UniqueFd> far;
    for (int i = 0; i < sockets_.per_peer; ++i) {
      auto pair = testing::connected_pair(sockets_.medium, i % sockets_.rails);
      if (sockets_.buffer_bytes != 0) {
        testing::limit_send_buffer(pair.near, sockets_.buffer_bytes);
        testing::limit_send_buffer(pair.far, sockets_.buffer_bytes);
      }
      ranks_[static_cast<std::size_t>(rank)].sockets.push_back(testing::duplicate(pair.near));
      ranks_[static_cast<std::size_t>(peer)].sockets.push_back(testing::duplicate(pair.far));
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

  Sockets sockets_;
  std::vector<Rank> ranks_;
};

Medium over(const char* prefix, Sockets sockets) {
  const auto make = [sockets](int size, std::uint64_t) {
    return std::make_unique<TcpFixture>(size, sockets);
  };
  return {prefix, true, make, {.sources = true, .output = true}, 5};
}

using testing::Medium::kLoopback, testing::Medium::kUnixPair;
const Conformance one_socket(over("loopback, 1 socket: ", {kLoopback, 1, 0}));
const Conformance three_sockets(over("loopback, 3 sockets: ", {kLoopback, 3, 0}));
const Conformance two_rails(over("loopback, 4 sockets, 2 rails: ", {kLoopback, 4, 0, 2}));
const Conformance three_rails(over("loopback, 3 rails, 2 KiB buffers: ", {kLoopback, 3, 2048, 3}));
const Conformance small_buffers(over("loopback, 2 KiB buffers: ", {kLoopback, 1, 2048}));
const Conformance unix_pairs(over("unix pairs, 2 sockets: ", {kUnixPair, 2, 0}));
const Conformance many_small(over("unix pairs, 8 sockets, 4 KiB buffers: ", {kUnixPair, 8, 4096}));

}  // namespace
}  // namespace pycoll::conformance

RUN_TESTS()
