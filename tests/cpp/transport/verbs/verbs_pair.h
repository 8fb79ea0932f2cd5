// A pair of ranks over the fake provider, of which one sends to the other: for the tests of what is
// registered.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "tests/cpp/support/arena_block.h"
#include "tests/cpp/transport/conformance/conformance_world.h"
#include "tests/cpp/transport/verbs/verbs_fixture.h"

namespace pycoll::testing {

using conformance::check_segment;
using conformance::fill;
using conformance::header_for;
using conformance::now;
using transport::kSegmentBytesMax;
using transport::LinkState;
using transport::RecvChannel;
using transport::Segment;
using transport::SendChannel;
using transport::VerbsTransport;
using transport::verbs::RegistrationFacts;

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kPiece = kSmallLimits.piece_bytes;
// A piece reaches so far into the next one.
constexpr std::size_t kPinned = kPiece + kSegmentBytesMax;
// From here on a segment lies in this piece and in none before.
constexpr std::size_t kMiddle = kPiece / 2;
constexpr std::uint64_t kKey = 77;

// Rank 0 sends, rank 1 receives, on channel 3.
class Pair {
 public:
  explicit Pair(const FakeOptions& options = {.seed = 3},
                const transport::verbs::RegistrationLimits& limits = kSmallLimits)
      : fake(options), ranks_(2, [=](int rank) { return make_fake(rank, 2, limits); }) {}

  VerbsTransport& at(int rank) { return ranks_.at(rank); }
  SendChannel& send() { return at(0).link(1)->send_channel(3); }
  RecvChannel& recv() { return at(1).link(0)->recv_channel(3); }
  transport::ZeroCopySender& zero_copy() { return *send().capabilities().zero_copy; }
  transport::SourceRecord& sources() { return *send().capabilities().sources; }
  RegistrationFacts facts() { return at(0).registration_facts(); }

  void poll() {
    at(0).poll();
    at(1).poll();
  }
  template <typename Done>
  void settle(const char* what, Done done) {
    const Nanoseconds start = now();
    while (!done()) {
      CHECK(now() - start < conformance::kPatience, "waited in vain for %s", what);
      poll();
    }
  }

  void hand_over(const std::byte* data, std::size_t bytes) {
    settle("a free slot", [&] { return send().hand_over(header_for(kKey, sent_, bytes), data); });
    ++sent_;
  }
  // The oldest segment holds what key `content` fills.
  void receive(std::uint64_t content, std::size_t bytes) {
    settle("a segment", [&] { return recv().peek() != nullptr; });
    const Segment* segment = recv().peek();
    CHECK(segment->header == header_for(kKey, received_, bytes), "another header");
    CHECK(conformance::holds(segment->data, bytes, content), "segment %llu arrived changed",
          static_cast<unsigned long long>(received_));
    recv().release();
    ++received_;
  }
  void drain() {
    settle("the memory", [&] { return send().drained(); });
  }
  // There and back to memory that may change again.
  void pass(std::byte* data, std::size_t bytes) {
    const std::uint64_t content = ++contents_;
    fill(data, bytes, content);
    hand_over(data, bytes);
    receive(content, bytes);
    drain();
  }

  FakeVerbs fake;

 private:
  VerbsRanks ranks_;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t contents_ = 1000;
};

// What was pinned for slots alone, before any array was.
inline std::size_t pinned_of_slots(Pair& pair) {
  CHECK(pair.facts().pinned_bytes == 0, "an array is registered that nobody sent");
  return pair.fake.registered_bytes();
}

}  // namespace pycoll::testing
