// Worlds of verbs transports over the fake provider: one device per rank, and for each pair a
// socket as liveness.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "socket_pairs.h"
#include "transport/verbs.h"
#include "transport_conformance.h"
#include "verbs_fake.h"

namespace pycoll::testing {

// Transports of `size` ranks, each pair linked.
class VerbsRanks {
 public:
  // `make(rank)` opens the transport of a rank.
  template <typename Make>
  VerbsRanks(int size, Make make) : sockets_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) ranks_.push_back(make(rank));
    for (int a = 0; a < size; ++a) {
      for (int b = 0; b < a; ++b) link(a, b);
    }
  }

  transport::VerbsTransport& at(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  // Peers see just what the kernel shows them of a killed process: sockets at their end.
  void kill(int rank) {
    for (const UniqueFd& socket : sockets_[static_cast<std::size_t>(rank)]) {
      ::shutdown(socket.get(), SHUT_RDWR);
    }
  }

 private:
  void link(int a, int b) {
    std::string address_of_a;
    std::string address_of_b;
    Status status = at(a).prepare(b, &address_of_a);
    CHECK(status.ok(), "%s", status.message().c_str());
    status = at(b).prepare(a, &address_of_b);
    CHECK(status.ok(), "%s", status.message().c_str());
    SocketPair pair = unix_pair();
    sockets_[static_cast<std::size_t>(a)].push_back(duplicate(pair.near));
    sockets_[static_cast<std::size_t>(b)].push_back(duplicate(pair.far));
    status = at(a).attach(b, address_of_b, std::move(pair.near), "rank " + std::to_string(b));
    CHECK(status.ok(), "%s", status.message().c_str());
    status = at(b).attach(a, address_of_a, std::move(pair.far), "rank " + std::to_string(a));
    CHECK(status.ok(), "%s", status.message().c_str());
  }

  std::vector<std::vector<UniqueFd>> sockets_;  // duplicates of each rank's ends
  std::vector<std::unique_ptr<transport::VerbsTransport>> ranks_;
};

// Pieces of 256 KiB, 1 MiB in all.
inline constexpr transport::verbs::RegistrationLimits kSmallLimits{256 << 10, 1 << 20};

inline std::unique_ptr<transport::VerbsTransport> make_fake(
    int rank, int size, const transport::verbs::RegistrationLimits& limits = kSmallLimits) {
  std::unique_ptr<transport::VerbsTransport> made;
  const Status status = transport::VerbsTransport::create(rank, size, FakeVerbs::port(rank),
                                                          FakeVerbs::api(), limits, &made);
  CHECK(status.ok(), "%s", status.message().c_str());
  return made;
}

class FakeVerbsFixture : public conformance::Fixture {
 public:
  FakeVerbsFixture(int size, const FakeOptions& options)
      : fake_(options), ranks_(size, [size](int rank) { return make_fake(rank, size); }) {}

  transport::Transport& at(int rank) override { return ranks_.at(rank); }
  void kill(int rank) override { ranks_.kill(rank); }

 private:
  FakeVerbs fake_;
  VerbsRanks ranks_;
};

// A network that reorders and delays what it may; up to `inline_max` bytes travel inline.
inline conformance::Medium fake_verbs_medium(std::uint32_t inline_max) {
  return {"", true, [inline_max](int size, std::uint64_t seed) {
            return std::make_unique<FakeVerbsFixture>(size, FakeOptions{seed, inline_max, false});
          }};
}

}  // namespace pycoll::testing
