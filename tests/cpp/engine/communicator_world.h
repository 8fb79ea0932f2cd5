// Worlds of real communicators in one process: over shared memory with sockets as liveness, or over
// TCP streams. Ranks are threads of the test.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/communicator.h"
#include "tests/cpp/plan/collective_plans.h"
#include "tests/cpp/support/socket_pairs.h"
#include "tests/cpp/transport/shm/shm_fixture.h"
#include "transport/tcp/tcp.h"

namespace pycoll::testing {

inline constexpr Nanoseconds kSecond = 1'000'000'000;
inline constexpr Nanoseconds kPatience = 120 * kSecond;  // for a loaded machine under a sanitizer

enum class Fabric { kShm, kTcp };
inline constexpr Fabric kFabrics[] = {Fabric::kShm, Fabric::kTcp};
inline const char* name_of(Fabric fabric) { return fabric == Fabric::kShm ? "shm" : "tcp"; }

class CommunicatorWorld {
 public:
  CommunicatorWorld(int size, Fabric fabric) : sockets_(static_cast<std::size_t>(size)) {
    std::vector<std::shared_ptr<transport::ShmTransport>> shm;
    std::vector<std::shared_ptr<transport::TcpTransport>> tcp;
    for (int rank = 0; rank < size; ++rank) {
      if (fabric == Fabric::kShm) shm.push_back(make_shm(rank, size));
      if (fabric == Fabric::kTcp)
        tcp.push_back(std::make_shared<transport::TcpTransport>(rank, size));
    }
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        SocketPair pair = unix_pair();
        sockets_[static_cast<std::size_t>(a)].push_back(copy_of(pair.near.get()));
        sockets_[static_cast<std::size_t>(b)].push_back(copy_of(pair.far.get()));
        if (fabric == Fabric::kShm) {
          attach_shm(*at(shm, a), *at(shm, b), b, std::move(pair.near));
          attach_shm(*at(shm, b), *at(shm, a), a, std::move(pair.far));
        } else {
          attach_tcp(*at(tcp, a), b, std::move(pair.near));
          attach_tcp(*at(tcp, b), a, std::move(pair.far));
        }
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      if (fabric == Fabric::kShm) add(rank, size, at(shm, rank));
      if (fabric == Fabric::kTcp) add(rank, size, at(tcp, rank));
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  engine::Communicator& at(int rank) { return *at(ranks_, rank); }
  // Destroys the communicator of `rank`, which closes it.
  void drop(int rank) { at(ranks_, rank).reset(); }
  engine::Communicator::Handle take(int rank) { return std::move(at(ranks_, rank)); }

  // Peers see what the kernel shows them of a killed process. The rank must do nothing any more.
  void kill(int rank) {
    for (const UniqueFd& socket : at(sockets_, rank)) ::shutdown(socket.get(), SHUT_RDWR);
  }

 private:
  template <typename Value>
  static Value& at(std::vector<Value>& all, int rank) {
    return all[static_cast<std::size_t>(rank)];
  }

  static void attach_tcp(transport::TcpTransport& to, int peer, UniqueFd socket) {
    std::vector<UniqueFd> sockets;
    sockets.push_back(std::move(socket));
    const Status status = to.attach(peer, std::move(sockets), "peer " + std::to_string(peer));
    CHECK(status.ok(), "%s", status.message().c_str());
  }

  void add(int rank, int size, std::shared_ptr<transport::Transport> transport) {
    engine::EngineOptions options;
    options.rank = rank;
    options.size = size;
    options.transports.push_back(std::move(transport));
    options.clock = std::make_shared<SteadyClock>();
    engine::Communicator::Handle made;
    const Status status = engine::Communicator::create(std::move(options), &made);
    CHECK(status.ok(), "%s", status.message().c_str());
    ranks_.push_back(std::move(made));
  }

  std::vector<std::vector<UniqueFd>> sockets_;  // copies of each rank's ends
  std::vector<engine::Communicator::Handle> ranks_;
};

// Runs body(rank) on a thread of its own for each of `ranks`; returns when all have.
inline void on_threads(const std::vector<int>& ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (const int rank : ranks) threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<int> ranks_below(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

inline void expect_ok(const Status& status, const char* where) {
  CHECK(status.ok(), "%s: %s", where, status.message().c_str());
}

inline void expect(const Status& status, Code code, const std::vector<int>& ranks,
                   const char* where) {
  CHECK(status.code() == code, "%s: code %u: %s", where, static_cast<unsigned>(status.code()),
        status.message().c_str());
  CHECK(status.ranks() == ranks, "%s: names other ranks: %s", where, status.message().c_str());
}

}  // namespace pycoll::testing
