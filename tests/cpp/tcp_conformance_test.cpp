// The transport contract over TCP: on loopback connections and on unix socket pairs, with one
// socket per peer and with several, and with kernel buffers so small that every segment moves in
// pieces. What is particular to TCP is in tcp_test.cpp.
#include <sys/socket.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "socket_pairs.h"
#include "transport/tcp.h"
#include "transport_conformance.h"

namespace pycoll::conformance {
namespace {

using testing::Medium;
using transport::TcpTransport;

// kBufferBytes bounds the kernel's send buffer; 0 leaves it as it is.
template <Medium kMedium, int kSockets, int kBufferBytes>
class TcpFixture {
 public:
  static constexpr bool kThreads = true;

  TcpFixture(int size, std::uint64_t) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back({std::make_unique<TcpTransport>(rank, size), {}});
    }
    for (int rank = 0; rank < size; ++rank) {
      for (int peer = 0; peer < rank; ++peer) connect(rank, peer);
    }
  }

  transport::Transport& at(int rank) { return *ranks_[static_cast<std::size_t>(rank)].transport; }
  void idle() {}
  // The kernel does the same with the sockets of a killed process.
  void kill(int rank) {
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
    for (int i = 0; i < kSockets; ++i) {
      auto pair = testing::connected_pair(kMedium);
      if (kBufferBytes != 0) {
        testing::limit_send_buffer(pair.near, kBufferBytes);
        testing::limit_send_buffer(pair.far, kBufferBytes);
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

  std::vector<Rank> ranks_;
};

// The suite's cases for one fixture, their names led by `medium`.
template <typename Fixture>
bool register_as(const std::string& medium) {
  static std::deque<std::string> names;  // a case only points to its name
  auto& cases = testing::cases();
  const std::size_t before = cases.size();
  register_cases<Fixture>();
  for (std::size_t i = before; i < cases.size(); ++i) {
    names.push_back(medium + cases[i].name);
    cases[i].name = names.back().c_str();
  }
  return cases.size() != before;
}

[[maybe_unused]] const bool registered =
    register_as<TcpFixture<Medium::kLoopback, 1, 0>>("loopback, 1 socket: ") &&
    register_as<TcpFixture<Medium::kLoopback, 3, 0>>("loopback, 3 sockets: ") &&
    register_as<TcpFixture<Medium::kLoopback, 1, 2048>>("loopback, 2 KiB buffers: ") &&
    register_as<TcpFixture<Medium::kUnixPair, 2, 0>>("unix pairs, 2 sockets: ") &&
    register_as<TcpFixture<Medium::kUnixPair, 8, 4096>>("unix pairs, 8 sockets, 4 KiB buffers: ");

}  // namespace
}  // namespace pycoll::conformance

RUN_TESTS()
