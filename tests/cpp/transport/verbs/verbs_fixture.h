// Worlds of verbs transports over the fake provider: as many ports per rank as pairs have rails,
// and for each pair a socket as liveness.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/socket_pairs.h"
#include "tests/cpp/transport/conformance/transport_conformance.h"
#include "tests/cpp/transport/verbs/fake/verbs_fake.h"
#include "transport/verbs/verbs.h"
#include "transport/verbs/verbs_layout.h"

namespace pycoll::testing {

// Transports of `size` ranks, each pair linked by rails over the first ports of both.
class VerbsRanks {
 public:
  // `make(rank)` opens the transport of a rank.
  template <typename Make>
  VerbsRanks(int size, Make make, int rails = 1) : sockets_(static_cast<std::size_t>(size)) {
    for (int rail = 0; rail < rails; ++rail) rails_.push_back(rail);
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
    Status status = at(a).prepare(b, rails_, &address_of_a);
    CHECK(status.ok(), "%s", status.message().c_str());
    status = at(b).prepare(a, rails_, &address_of_b);
    CHECK(status.ok(), "%s", status.message().c_str());
    SocketPair pair = unix_pair();
    sockets_[static_cast<std::size_t>(a)].push_back(duplicate(pair.near));
    sockets_[static_cast<std::size_t>(b)].push_back(duplicate(pair.far));
    status = at(a).attach(b, address_of_b, std::move(pair.near), "rank " + std::to_string(b));
    CHECK(status.ok(), "%s", status.message().c_str());
    status = at(b).attach(a, address_of_a, std::move(pair.far), "rank " + std::to_string(a));
    CHECK(status.ok(), "%s", status.message().c_str());
  }

  std::vector<int> rails_;
  std::vector<std::vector<UniqueFd>> sockets_;  // duplicates of each rank's ends
  std::vector<std::unique_ptr<transport::VerbsTransport>> ranks_;
};

// Pieces of 256 KiB, 1 MiB in all, each from its first byte on.
inline constexpr transport::verbs::RegistrationLimits kSmallLimits{256 << 10, 1 << 20, 0};

// The ports of a rank that has several: those of two devices of its own in turns.
inline std::vector<transport::VerbsPort> fake_ports(int rank, int rails) {
  if (rails == 1) return {FakeVerbs::port(rank)};
  std::vector<transport::VerbsPort> ports;
  for (int i = 0; i < rails; ++i) ports.push_back(FakeVerbs::port(2 * rank + i % 2, 1 + i / 2));
  return ports;
}

inline std::unique_ptr<transport::VerbsTransport> make_fake(
    int rank, int size, const transport::verbs::RegistrationLimits& limits = kSmallLimits,
    int rails = 1) {
  std::unique_ptr<transport::VerbsTransport> made;
  const Status status = transport::VerbsTransport::create(rank, size, fake_ports(rank, rails),
                                                          FakeVerbs::api(), limits, &made);
  CHECK(status.ok(), "%s", status.message().c_str());
  return made;
}

// Transports over so many rails; what they register of arrays is bounded at each of their ports.
inline VerbsRanks fake_ranks(int size, int rails, std::size_t copied_bytes = 0) {
  transport::verbs::RegistrationLimits limits = kSmallLimits;
  limits.pinned_bytes *= static_cast<std::size_t>(rails);
  limits.copied_bytes = copied_bytes;
  return {size, [=](int rank) { return make_fake(rank, size, limits, rails); }, rails};
}

class FakeVerbsFixture : public conformance::Fixture {
 public:
  FakeVerbsFixture(int size, const FakeOptions& options, int rails)
      : fake_(options),
        // With one rail arrays are read from the beginning, with several once they were copied.
        ranks_(fake_ranks(size, rails, rails > 1 ? transport::kSegmentBytesMax : 0)) {}

  transport::Transport& at(int rank) override { return ranks_.at(rank); }
  void kill(int rank) override { ranks_.kill(rank); }
  std::uint64_t depth() const override { return transport::verbs::kVerbsDepth; }

 private:
  FakeVerbs fake_;
  VerbsRanks ranks_;
};

inline constexpr conformance::Abilities kVerbsAbilities = {
    .sources = true, .zero_copy = true, .regions = true};

// A network that reorders and delays what it may; up to `inline_max` bytes travel inline. Two of
// these are tested.
inline conformance::Medium fake_verbs_medium(std::uint32_t inline_max, int rails) {
  return {"", true,
          [inline_max, rails](int size, std::uint64_t seed) {
            const FakeOptions options{seed, inline_max, false};
            return std::make_unique<FakeVerbsFixture>(size, options, rails);
          },
          kVerbsAbilities, 2};
}

}  // namespace pycoll::testing
