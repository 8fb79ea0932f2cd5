// Conformance cases about payloads that several peers read in place. See conformance_world.h.
#include <array>
#include <deque>

#include "tests/cpp/transport/conformance/conformance_cases.h"
#include "tests/cpp/transport/conformance/conformance_world.h"

namespace pycoll::conformance {
namespace {

// One rank's channels to several peers that repeat each other's segments, against queues of what
// must arrive.
class RandomRepeats {
 public:
  RandomRepeats(const Medium& medium, std::uint64_t seed)
      : world_(medium, kPeers + 1, seed), prng_(seed) {
    for (int peer = 0; peer < kPeers; ++peer) {
      CHECK(multicast(peer).memory() == multicast(0).memory(), "memory of channel %d", peer);
    }
  }

  void run(int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      if (prng_.chance(1, 2)) {
        publish(static_cast<int>(prng_.below(kPeers)));
      } else {
        receive(static_cast<int>(prng_.below(kPeers)));
      }
      world_.steps(1);
    }
    for (int peer = 0; peer < kPeers; ++peer) {
      while (!expected_[at(peer)].empty()) {
        world_.settle("what was repeated", [&] { return receive(peer); });
      }
    }
  }

 private:
  static constexpr int kPeers = 4;
  struct Sent {
    std::uint64_t key;
    std::uint64_t index;
    std::size_t bytes;
  };

  static std::size_t at(int peer) { return static_cast<std::size_t>(peer); }
  SendChannel& send(int peer) { return world_.send(0, peer + 1, 2); }
  transport::Multicast& multicast(int peer) { return *send(peer).capabilities().multicast; }

  void publish(int first) {
    const Sent sent{prng_.next(), index_++, random_bytes(prng_)};
    if (!try_send(send(first), sent.key, sent.index, sent.bytes)) return;
    expected_[at(first)].push_back(sent);
    for (int peer = 0; peer < kPeers; ++peer) {
      if (peer == first || prng_.chance(1, 3)) continue;
      const bool full = expected_[at(peer)].size() == kChannelDepth;
      const bool repeated =
          multicast(peer).repeat(header_for(sent.key, sent.index, sent.bytes), send(first));
      CHECK(repeated || full, "no free slot to repeat next to %zu segments",
            expected_[at(peer)].size());
      if (repeated) expected_[at(peer)].push_back(sent);
    }
  }

  bool receive(int peer) {
    if (expected_[at(peer)].empty()) return false;
    const Sent& sent = expected_[at(peer)].front();
    if (!try_receive(world_.recv(peer + 1, 0, 2), sent.key, sent.index, sent.bytes)) return false;
    expected_[at(peer)].pop_front();
    return true;
  }

  World world_;
  Prng prng_;
  std::uint64_t index_ = 0;
  std::array<std::deque<Sent>, kPeers> expected_;
};

void repeated_payloads_reach_every_peer(const Medium& medium) {
  for (std::uint64_t round = 0; round < 5; ++round) {
    const std::uint64_t seed = seed_of(800 + round);
    std::printf("  seed %#llx\n", static_cast<unsigned long long>(seed));
    RandomRepeats(medium, seed).run(4000);
  }
}

}  // namespace

std::vector<Case> cases_about_multicast() {
  return {
      PYCOLL_CASE(repeated_payloads_reach_every_peer),
  };
}

}  // namespace pycoll::conformance
