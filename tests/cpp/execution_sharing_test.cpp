// Broadcasts of which the root copies its part: which segments it puts in the receiver's memory,
// that it waits to hear where, and that nobody can tell by the result.
#include <algorithm>
#include <cstring>
#include <memory>

#include "arena_block.h"
#include "collective_plans.h"
#include "direct_write_world.h"

using namespace pycoll;
using namespace pycoll::testing;
using executor::Execution;
using executor::Progress;

namespace {

constexpr std::size_t kSegment = 16 * 1024;
constexpr std::size_t kSegmentCount = kSegment / sizeof(Element);

// While something lies in the arena it stays the one that peers have mapped.
struct Pair : World {
  Pair() : World(2) {}
  Block kept{kSegment};
};

struct Manner {
  Collective collective = Collective::kBroadcast;
  std::uint32_t channels = 1;
  bool apart = false;     // the result of rank 0, if it has one, is not in place
  bool reachable = true;  // the memory of rank 1
  bool crossed = false;   // all in one lane, and rank 1 reads the last channel first
  bool gathers() const { return collective == Collective::kGather; }
};

// Rank 0 sends each chunk by a channel of its own to rank 1; of a gather the first block, the other
// one being empty.
PlanImage pair_plan(int rank, const Manner& manner) {
  PlanBuilder builder(manner.collective, 2, static_cast<std::uint32_t>(rank),
                      manner.gathers() ? 1 : 0, manner.channels);
  builder.header.lane_count = static_cast<std::uint8_t>(manner.crossed ? 1 : manner.channels);
  for (std::uint32_t place = 0; place < manner.channels; ++place) {
    const std::uint32_t chunk = manner.crossed && rank == 1 ? manner.channels - 1 - place : place;
    const auto number = static_cast<std::uint16_t>(chunk);
    const auto lane = static_cast<std::uint8_t>(manner.crossed ? 0 : chunk);
    if (rank == 0) {
      const std::uint16_t to = builder.send(1, number);
      plan::Row& row = builder.row(chunk, {}, {to}, lane);
      take(row, plan::Buffer::kInput, chunk);
      if (!manner.gathers()) put(row, plan::Buffer::kOutput, chunk);
      row.flags = plan::kFlagZeroCopy;
    } else {
      const std::uint16_t from = builder.recv(0, number);
      plan::Row& row = builder.row(chunk, {from}, {}, lane);
      put(row, plan::Buffer::kOutput, chunk);
      row.flags = plan::kFlagFlush | plan::kFlagDirectWrite;
    }
  }
  return load(builder);
}

// Operation number `sequence` of `world`.
class Transfer {
 public:
  Transfer(World& world, std::uint64_t sequence, std::size_t count, Manner manner)
      : world_(&world),
        sequence_(sequence),
        manner_(manner),
        values_(input_of(0, static_cast<int>(sequence), count)),
        sender_(count * sizeof(Element)),
        sender_result_(count * sizeof(Element)),
        receiver_(count * sizeof(Element)),
        ordinary_(count) {
    std::memcpy(sender_.data(), values_.data(), sender_.bytes());
  }

  void begin(int rank) {
    std::byte* input = sender_.data();
    std::byte* output = rank == 1 ? result() : manner_.apart ? sender_result_.data() : input;
    executor::CollectiveRequest request = all_reduce(pair_plan(rank, manner_), values_, ordinary_);
    request.input = {rank == 0 ? input : nullptr, rank == 0 ? sender_.bytes() : 0};
    request.output = {output, rank == 0 && manner_.gathers() ? 0 : sender_.bytes()};
    request.descriptor.collective = manner_.collective;
    if (manner_.gathers()) request.counts.push_back(0);
    request.segment_bytes = kSegment;
    const Status status = executions_[rank].start(std::move(request), sequence_, world_->at(rank));
    CHECK(status.ok(), "%s", status.message().c_str());
  }
  Progress advance(int rank) { return executions_[rank].advance(); }
  void finish() {
    for (int turn = 0; turn < 10'000; ++turn) {
      const Progress sender = advance(0), receiver = advance(1);
      CHECK(sender != Progress::kDisagree && receiver != Progress::kDisagree, "ranks disagree");
      if (sender != Progress::kDone || receiver != Progress::kDone) continue;
      CHECK(std::memcmp(result(), values_.data(), sender_.bytes()) == 0, "other values arrived");
      return;
    }
    CHECK(false, "operation %llu hangs", static_cast<unsigned long long>(sequence_));
  }

 private:
  std::byte* result() {
    return manner_.reachable ? receiver_.data() : reinterpret_cast<std::byte*>(ordinary_.data());
  }

  World* world_;
  std::uint64_t sequence_;
  Manner manner_;
  std::vector<Element> values_;
  Block sender_, sender_result_, receiver_;
  std::vector<Element> ordinary_;
  Execution executions_[2];
};

// How many segments of an operation were placed, in operations that sweep to and fro. By the first
// one the receiver learns where memory is lent from.
int placed_by(World& world, std::size_t count, Manner manner) {
  constexpr std::uint64_t kOperations = 5;
  int placed[kOperations + 1];
  for (std::uint64_t sequence = 1; sequence <= kOperations; ++sequence) {
    Transfer transfer(world, sequence, count, manner);
    const int before = world.placed();
    transfer.begin(0);
    transfer.begin(1);
    transfer.finish();
    placed[sequence] = world.placed() - before;
    CHECK(sequence <= 2 || placed[sequence] == placed[2], "%d segments, then %d", placed[2],
          placed[sequence]);
  }
  return placed[2];
}

}  // namespace

TEST(every_other_segment_is_placed) {
  for (const std::uint32_t channels : {1u, 2u, 3u}) {
    for (int segments = 1; segments <= 5; ++segments) {
      Pair world;
      const std::size_t count = channels * (kSegmentCount * static_cast<std::size_t>(segments) - 7);
      const int placed = placed_by(world, count, {.channels = channels});
      // Of the last one without a fellow, every other channel's.
      const int channel_count = static_cast<int>(channels);
      const int wanted = channel_count * (segments / 2) + segments % 2 * (channel_count / 2);
      CHECK(placed == wanted, "%d of %d segments on each of %d channels, not %d", placed, segments,
            channel_count, wanted);
    }
  }
}

TEST(who_has_something_else_to_copy_or_shares_a_core_leaves_all_to_the_receiver) {
  Pair world;
  CHECK(placed_by(world, 4 * kSegmentCount, {.apart = true}) == 0, "copies for both");
  Pair oversubscribed;
  oversubscribed.share_cores();
  CHECK(placed_by(oversubscribed, 4 * kSegmentCount, {}) == 0, "divides what one core does");
}

TEST(who_gathers_has_long_blocks_of_others_placed) {
  const Manner gather{.collective = Collective::kGather};
  for (int segments = 1; segments <= 5; ++segments) {
    const std::size_t count = kSegmentCount * static_cast<std::size_t>(segments) - 7;
    Pair world, oversubscribed;
    oversubscribed.share_cores();
    const int all = placed_by(world, count, gather),
              half = placed_by(oversubscribed, count, gather);
    CHECK(all == (segments == 1 ? 0 : segments), "%d of %d segments", all, segments);
    CHECK(half == segments / 2, "%d of %d segments where cores are shared", half, segments);
  }
}

TEST(a_receiver_that_offers_nothing_fetches_all) {
  for (const std::uint32_t channels : {1u, 2u}) {
    Pair world;
    const Manner manner{.channels = channels, .reachable = false};
    CHECK(placed_by(world, 7 * channels * kSegmentCount, manner) == 0, "where?");
  }
}

TEST(who_copies_a_part_waits_to_hear_where_it_belongs) {
  for (const std::uint32_t channels : {1u, 2u}) {
    Pair world;
    const std::size_t count = 6 * channels * kSegmentCount;
    placed_by(world, count, {.channels = channels});
    const int before = world.placed();
    Transfer transfer(world, 6, count, {.channels = channels});
    transfer.begin(0);
    for (int turn = 0; turn < 10; ++turn) (void)transfer.advance(0);
    transfer.begin(1);
    transfer.finish();
    const int placed = world.placed() - before;
    CHECK(placed == 3 * static_cast<int>(channels), "%d segments", placed);
  }
}

TEST(nobody_waits_for_what_the_receiver_reads_first) {
  for (int segments = 1; segments <= 3; ++segments) {
    Pair world;
    const std::size_t count = 2 * kSegmentCount * static_cast<std::size_t>(segments);
    const int placed = placed_by(world, count, {.channels = 2, .crossed = true});
    CHECK(placed == segments, "%d of %d segments", placed, segments);
  }
}

RUN_TESTS()
