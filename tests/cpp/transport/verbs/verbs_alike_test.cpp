// Segments that go without a header because they are like the one before on their rail: whatever
// comes between, and in whatever order packets arrive, each gets the header that it was sent with.
#include <array>
#include <deque>
#include <string>
#include <utility>

#include "base/prng.h"
#include "tests/cpp/transport/conformance/conformance_world.h"
#include "tests/cpp/transport/verbs/verbs_fixture.h"
#include "transport/verbs/verbs_layout.h"

namespace pycoll::testing {
namespace {

using conformance::now;
using transport::Link;
using transport::LinkState;
using transport::RecvChannel;
using transport::Segment;
using transport::SegmentHeader;
using transport::SendChannel;
using transport::verbs::Immediate;
using transport::verbs::Kind;

constexpr std::uint32_t kChannels = 3;
constexpr std::uint64_t kSeeds = 100;

// Runs of like segments both ways over a few channels, taken now and then.
class Runs {
 public:
  Runs(std::uint64_t seed, int rails)
      : seed_(seed), prng_(seed), fake_({.seed = seed}), ranks_(fake_ranks(2, rails)) {}

  void run() {
    for (int i = 0; i < 60; ++i) {
      const int from = static_cast<int>(prng_.below(2));
      const auto channel = static_cast<std::uint32_t>(prng_.below(kChannels));
      if (prng_.chance(1, 2)) ++header_.sequence;
      if (prng_.chance(1, 3)) header_.agreement = prng_.next();
      if (prng_.chance(1, 3)) header_.bytes = kLengths[prng_.below(kLengths.size())];
      for (std::uint64_t like = 1 + prng_.below(6); like != 0; --like) send(from, channel);
    }
    const Nanoseconds start = now();
    while (outstanding() != 0) {
      CHECK(now() - start < conformance::kPatience, "seed %llu: %zu did not arrive", seed(),
            outstanding());
      take();
    }
  }

 private:
  static constexpr std::array<std::uint32_t, 6> kLengths{0, 8, 200, 4096, 20'000, 65'536};
  struct Sent {
    SegmentHeader header;
    std::uint64_t key;
  };

  unsigned long long seed() const { return seed_; }
  Link& link(int rank) { return *ranks_.at(rank).link(1 - rank); }
  std::deque<Sent>& expected(int to, std::uint32_t channel) {
    return expected_[static_cast<std::size_t>(to)][channel];
  }
  std::size_t outstanding() {
    std::size_t all = 0;
    for (const auto& channels : expected_) {
      for (const auto& channel : channels) all += channel.size();
    }
    return all;
  }

  void send(int from, std::uint32_t channel) {
    SendChannel& through = link(from).send_channel(channel);
    std::byte* slot_buffer = through.reserve(header_.bytes);
    for (const Nanoseconds start = now(); slot_buffer == nullptr;
         slot_buffer = through.reserve(header_.bytes)) {
      CHECK(now() - start < conformance::kPatience, "seed %llu: no free slot", seed());
      take();
    }
    const std::uint64_t key = prng_.next();
    conformance::fill(slot_buffer, header_.bytes, key);
    through.commit(header_);
    expected(1 - from, channel).push_back({header_, key});
    if (prng_.chance(1, 3)) take();
  }

  void take() {
    for (const int rank : {0, 1}) {
      ranks_.at(rank).poll();
      for (std::uint32_t number = 0; number < kChannels; ++number) {
        RecvChannel& channel = link(rank).recv_channel(number);
        while (const Segment* found = channel.peek()) {
          CHECK(!expected(rank, number).empty(), "seed %llu: a segment that was not sent", seed());
          const Sent sent = expected(rank, number).front();
          expected(rank, number).pop_front();
          CHECK(found->header == sent.header, "seed %llu: sequence %llu, %u bytes for %llu, %u",
                seed(), static_cast<unsigned long long>(found->header.sequence),
                found->header.bytes, static_cast<unsigned long long>(sent.header.sequence),
                sent.header.bytes);
          CHECK(conformance::holds(found->data, sent.header.bytes, sent.key),
                "seed %llu: a payload arrived changed", seed());
          channel.release();
          if (prng_.chance(1, 4)) break;
        }
      }
    }
  }

  const std::uint64_t seed_;
  Prng prng_;
  FakeVerbs fake_;
  VerbsRanks ranks_;
  SegmentHeader header_;
  std::array<std::array<std::deque<Sent>, kChannels>, 2> expected_;
};

TEST(runs_of_like_segments_arrive_with_their_headers) {
  for (const int rails : {1, 2, 4}) {
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) Runs(seed, rails).run();
  }
}

// Two segments of 8 bytes with one header; the message that is to say `from` says `to`.
std::string end_of_a_pair(Immediate from, Immediate to) {
  FakeVerbs fake({});
  VerbsRanks ranks = fake_ranks(2, 1);
  fake.rewrite(from.bits(), to.bits());
  SendChannel& send = ranks.at(0).link(1)->send_channel(0);
  for (int i = 0; i < 2; ++i) {
    CHECK(send.reserve(8) != nullptr, "no free slot");
    send.commit({1, 5, 8, 0});
  }
  Link& link = *ranks.at(1).link(0);
  for (const Nanoseconds start = now(); link.state() == LinkState::kOpen;) {
    CHECK(now() - start < conformance::kPatience, "it is not lost");
    ranks.at(0).poll();
    ranks.at(1).poll();
  }
  return link.reason();
}

TEST(a_header_more_or_less_than_told_loses_the_link) {
  const std::pair<std::array<Immediate, 2>, const char*> lies[] = {
      {{Immediate{Kind::kSegment, 0, 0}, {Kind::kAlike, 0, 0}}, "a message of 40 bytes says 0"},
      {{Immediate{Kind::kAlike, 0, 1}, {Kind::kSegment, 0, 1}}, "a message of 8 bytes says 0"},
      {{Immediate{Kind::kAlike, 0, 1}, {Kind::kWrittenDirectly, 0, 1}},
       "a payload was placed where nothing"},
  };
  for (const auto& [told, words] : lies) {
    const std::string reason = end_of_a_pair(told[0], told[1]);
    CHECK(reason.find("malformed message from rank 0: " + std::string(words)) == 0,
          "\"%s\" but: %s", words, reason.c_str());
  }
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
