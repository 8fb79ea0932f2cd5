// Rows that lead a lane: which they are, that they run tiles ahead as far as channels have free
// slots, and that nobody can tell by the result.
#include "plan/leading_rows.h"

#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;

namespace {

constexpr std::size_t kElementsPerTile = 10;

executor::CollectiveRequest direct_sum(int size, int rank, const std::vector<Element>& input,
                                       std::vector<Element>& output) {
  auto request = all_reduce(direct_plan(size, rank), input, output);
  request.segment_bytes = kElementsPerTile * sizeof(Element);
  return request;
}

// How many more segments the channel takes.
std::uint32_t slot_buffer_in(transport::SendChannel& channel) {
  std::uint32_t slot_buffer = 0;
  for (; channel.reserve(8) != nullptr; ++slot_buffer) channel.commit({99, 0, 8, 0});
  return slot_buffer;
}

// Rank 0 of two: sends chunk 0 of `source`, which it may also copy, then receives. `back`: the
// channel of a token that goes out last, or none.
std::vector<std::uint32_t> leading_rows_of(plan::Buffer source, bool copies,
                                           const std::uint16_t* back) {
  PlanBuilder builder(Collective::kAllReduce, 2, 0);
  const std::uint16_t to = builder.send(1), from = builder.recv(1);
  plan::Row& first = builder.row(0, {}, {to});
  take(first, source, 0);
  if (copies) put(first, plan::Buffer::kOutput, 0);
  put(builder.row(0, {from}, {}), plan::Buffer::kOutput, 0);
  if (back != nullptr) {
    if (*back != to) builder.send(1, *back);
    builder.row(plan::kToken, {}, {*back == to ? to : std::uint16_t{2}});
  }
  return load(builder)->leading_rows();
}

}  // namespace

TEST(which_rows_lead_a_lane) {
  using Counts = std::vector<std::uint32_t>;
  const std::uint16_t same = 0, another = 3;
  CHECK(leading_rows_of(plan::Buffer::kInput, false, nullptr) == Counts{1},
        "a row that sends input");
  CHECK(leading_rows_of(plan::Buffer::kInput, false, &another) == Counts{1},
        "and a token elsewhere");
  CHECK(leading_rows_of(plan::Buffer::kInput, false, &same) == Counts{0},
        "a channel that is used later");
  CHECK(leading_rows_of(plan::Buffer::kOutput, false, nullptr) == Counts{0}, "output");
  CHECK(leading_rows_of(plan::Buffer::kInput, true, nullptr) == Counts{0}, "a row that writes");
  CHECK(ring_plan(4, 1)->leading_rows() == Counts{0}, "a ring goes on where it began");
  PlanBuilder sender(Collective::kAllReduce, 2, 0);
  take(sender.row(0, {}, {sender.send(1)}), plan::Buffer::kInput, 0);
  take(sender.row(0, {}, {sender.send(1, 1)}, 1), plan::Buffer::kInput, 0);
  put(sender.row(0, {sender.recv(1)}, {}, 1), plan::Buffer::kOutput, 0);
  sender.header.lane_count = 2;
  CHECK(load(sender)->leading_rows() == (Counts{0, 1}),
        "a lane that only sends has no leading rows");
}

TEST(leading_rows_run_ahead_while_slots_are_free) {
  for (const std::size_t tiles : {1u, 2u, 3u, 9u}) {
    Ranks ranks(2);
    std::vector<Element> data = input_of(0, 0, tiles * kElementsPerTile);
    const auto sum = ranks.at(0).start(direct_sum(2, 0, data, data), kSecond);
    ranks.run_until(kMillisecond);
    const std::uint32_t sent =
        transport::kChannelDepth - slot_buffer_in(ranks.link(0, 1).send_channel(0));
    CHECK(sent == std::min<std::size_t>(tiles, transport::kChannelDepth), "%u of %zu tiles", sent,
          tiles);
  }
}

// Three peers share the link: the leading rows stay within 512 KiB, which are two tiles of 3 * 64
// KiB, or three of 3 * 56 KiB, both less than a channel holds.
TEST(leading_rows_to_several_peers_stay_near) {
  for (const std::size_t segment :
       {transport::kSegmentBytesMax, transport::kSegmentBytesMax / 8 * 7}) {
    Ranks ranks(4);
    std::vector<Element> data = input_of(0, 0, 9 * segment / sizeof(Element));
    auto request = all_reduce(direct_plan(4, 0), data, data);
    request.segment_bytes = static_cast<std::uint32_t>(segment);
    const auto sum = ranks.at(0).start(std::move(request), kSecond);
    ranks.run_until(kMillisecond);
    const std::uint32_t tiles = segment == transport::kSegmentBytesMax ? 2 : 3;
    for (int peer = 1; peer < 4; ++peer) {
      const std::uint32_t sent =
          transport::kChannelDepth - slot_buffer_in(ranks.link(0, peer).send_channel(0));
      CHECK(sent == tiles, "%u segments to rank %d", sent, peer);
    }
  }
}

// In place and not, also where the last tile is short; ranks begin at different times.
TEST(results_are_the_same_ahead_or_not) {
  Prng prng(0x1ead5);
  for (int round = 0; round < 40; ++round) {
    const int size = 2 + static_cast<int>(prng.below(3));
    const std::size_t count = 1 + prng.below(200);
    Ranks ranks(size);
    std::vector<std::vector<Element>> inputs, outputs;
    for (int rank = 0; rank < size; ++rank) {
      inputs.push_back(input_of(rank, round, count));
      outputs.emplace_back(count);
    }
    const bool in_place = prng.chance(1, 2);
    std::vector<std::shared_ptr<Operation>> sums;
    for (int rank = 0; rank < size; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      auto& output = in_place ? inputs[at] : outputs[at];
      sums.push_back(ranks.at(rank).start(direct_sum(size, rank, inputs[at], output), kSecond));
      if (prng.chance(1, 2)) ranks.run_until((rank + 1) * kMillisecond);
    }
    ranks.run_until(100 * kMillisecond);
    for (int rank = 0; rank < size; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      CHECK(sums[at]->done() && sums[at]->status().ok(), "round %d: %s", round,
            sums[at]->status().message().c_str());
      CHECK((in_place ? inputs : outputs)[at] == sum_of(size, round, count),
            "round %d: rank %d of %d, %zu elements", round, rank, size, count);
    }
  }
}

RUN_TESTS()
