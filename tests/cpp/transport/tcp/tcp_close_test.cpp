// Closing in the middle of traffic: whatever the peer is sending at that moment, it sees a close
// and never a loss, and every segment that was committed before arrives.
#include <atomic>
#include <thread>
#include <vector>

#include "base/prng.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/socket_pairs.h"
#include "transport/tcp/tcp.h"

namespace pycoll::transport {
namespace {

using testing::Medium;

struct Numbered {
  std::uint32_t bytes;
  std::vector<std::byte> memory;
};

Numbered numbered(std::uint64_t seed, std::uint32_t channel, std::uint64_t index) {
  Prng prng(seed * 1000 + channel * 100 + index);
  Numbered one;
  one.bytes = static_cast<std::uint32_t>(prng.below(prng.chance(1, 2) ? 100 : 65537));
  one.memory.resize(one.bytes);
  for (auto& byte : one.memory) byte = static_cast<std::byte>(prng.next());
  return one;
}

class Closing {
 public:
  Closing(Medium medium, int sockets, int rails, std::uint64_t seed) : seed_(seed) {
    std::vector<UniqueFd> near;
    std::vector<UniqueFd> far;
    for (int i = 0; i < sockets; ++i) {
      auto pair = testing::connected_pair(medium, i % rails);
      near.push_back(std::move(pair.near));
      far.push_back(std::move(pair.far));
    }
    CHECK(leaver_.attach(1, std::move(near), "stayer").ok(), "attach");
    CHECK(stayer_.attach(0, std::move(far), "leaver").ok(), "attach");
  }

  void run() {
    std::thread stayer([this] { stay(); });
    leave();
    stayer.join();
  }

 private:
  // Sends some segments on every channel and closes without waiting for anything.
  void leave() {
    Prng prng(seed_);
    std::vector<Numbered> kept;
    for (int turns = static_cast<int>(prng.below(400)); turns > 0; --turns) {
      const auto number = static_cast<std::uint32_t>(prng.below(kChannelsMax));
      const std::uint64_t index = committed_[number].load();
      Numbered next = numbered(seed_, number, index);
      SendChannel& channel = leaver_.link(1)->send_channel(number);
      if (channel.hand_over({index + 1, 0, next.bytes, 0}, next.memory.data())) {
        kept.push_back(std::move(next));
        committed_[number].store(index + 1);
      }
      if (prng.chance(1, 3)) leaver_.poll();
      RecvChannel& input = leaver_.link(1)->recv_channel(number);
      if (prng.chance(1, 2) && input.peek() != nullptr) input.release();
    }
    leaver_.close();
  }

  // Sends without pause, receives everything, until the close is seen.
  void stay() {
    Link& link = *stayer_.link(0);
    const std::vector<std::byte> memory(kSegmentBytesMax);
    SteadyClock clock;
    const Nanoseconds begin = clock.now();
    while (link.state() == LinkState::kOpen) {
      for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
        (void)link.send_channel(number).hand_over({1, 0, kSegmentBytesMax, 0}, memory.data());
        take(number);
      }
      if (!stayer_.poll()) std::this_thread::yield();
      CHECK(clock.now() - begin < 60'000'000'000, "seed %llu: the close was not seen",
            static_cast<unsigned long long>(seed_));
    }
    CHECK(link.state() == LinkState::kClosed, "seed %llu: a close became a loss: %s",
          static_cast<unsigned long long>(seed_), link.reason().c_str());
    for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
      take(number);
      CHECK(taken_[number] == committed_[number].load(),
            "seed %llu, channel %u: %llu of %llu segments", static_cast<unsigned long long>(seed_),
            number, static_cast<unsigned long long>(taken_[number]),
            static_cast<unsigned long long>(committed_[number].load()));
    }
  }

  void take(std::uint32_t number) {
    RecvChannel& channel = stayer_.link(0)->recv_channel(number);
    while (const Segment* segment = channel.peek()) {
      const Numbered expected = numbered(seed_, number, taken_[number]);
      CHECK(segment->header.sequence == taken_[number] + 1 &&
                segment->header.bytes == expected.bytes &&
                (expected.bytes == 0 ||
                 std::memcmp(segment->data, expected.memory.data(), expected.bytes) == 0),
            "seed %llu: segment %llu of channel %u is not what was sent",
            static_cast<unsigned long long>(seed_), static_cast<unsigned long long>(taken_[number]),
            number);
      channel.release();
      ++taken_[number];
    }
  }

  const std::uint64_t seed_;
  std::array<std::atomic<std::uint64_t>, kChannelsMax> committed_{};
  std::array<std::uint64_t, kChannelsMax> taken_{};
  TcpTransport leaver_{0, 2};
  TcpTransport stayer_{1, 2};
};

void close_under_traffic(Medium medium, int sockets, int rails, std::uint64_t first_seed) {
  for (std::uint64_t seed = first_seed; seed < first_seed + 25; ++seed) {
    Closing(medium, sockets, rails, seed).run();
  }
}

TEST(closing_under_traffic_on_a_loopback_connection) {
  close_under_traffic(Medium::kLoopback, 1, 1, 100);
}
TEST(closing_under_traffic_on_three_loopback_connections) {
  close_under_traffic(Medium::kLoopback, 3, 1, 200);
}
TEST(closing_under_traffic_on_two_rails) { close_under_traffic(Medium::kLoopback, 2, 2, 500); }
TEST(closing_under_traffic_on_a_unix_pair) { close_under_traffic(Medium::kUnixPair, 1, 1, 300); }
TEST(closing_under_traffic_on_three_unix_pairs) {
  close_under_traffic(Medium::kUnixPair, 3, 1, 400);
}

}  // namespace
}  // namespace pycoll::transport

RUN_TESTS()
