// The copy strategy of a row: which segments the sender writes into the receiver's memory, that it
// waits until the receiver has announced its write window, and that the result is always the same.
#include <algorithm>
#include <cstring>
#include <memory>

#include "tests/cpp/executor/direct_write_world.h"
#include "tests/cpp/plan/collective_plans.h"
#include "tests/cpp/support/arena_block.h"

using namespace pycoll;
using namespace pycoll::testing;
using executor::Execution;
using executor::Progress;

namespace {

constexpr std::size_t kSegment = 16 * 1024;
constexpr std::size_t kSegmentCount = kSegment / sizeof(Element);

// A block keeps the arena alive, so that peers need not map another one.
struct Pair : World {
  Pair() : World(2) {}
  Block kept{kSegment};
};

struct Manner {
  plan::CopyStrategy copies = plan::CopyStrategy::kSplit;
  std::uint32_t channels = 1;
  bool gathers = false;   // a gather to rank 1, which has an empty block; else a broadcast
  bool apart = false;     // rank 0 copies the result of a broadcast to other memory
  bool reachable = true;  // peers can write into the memory of rank 1
  bool crossed = false;   // all in one lane, and rank 1 reads the last channel first
};

// Rank 0 sends each chunk on a channel of its own to rank 1.
PlanImage pair_plan(int rank, const Manner& manner) {
  PlanBuilder builder(manner.gathers ? Collective::kGather : Collective::kBroadcast, 2,
                      static_cast<std::uint32_t>(rank), manner.gathers ? 1 : 0, manner.channels);
  builder.header.lane_count = static_cast<std::uint8_t>(manner.crossed ? 1 : manner.channels);
  for (std::uint32_t place = 0; place < manner.channels; ++place) {
    const std::uint32_t chunk = manner.crossed && rank == 1 ? manner.channels - 1 - place : place;
    const auto number = static_cast<std::uint16_t>(chunk);
    const auto lane = static_cast<std::uint8_t>(manner.crossed ? 0 : chunk);
    if (rank == 0) {
      const std::uint16_t to = builder.send(1, number);
      plan::Row& row = builder.row(chunk, {}, {to}, lane);
      take(row, plan::Buffer::kInput, chunk);
      if (!manner.gathers) put(row, plan::Buffer::kOutput, chunk);
      row.flags = plan::kFlagZeroCopy;
      row.copies = static_cast<std::uint8_t>(manner.copies);
      if (manner.copies != plan::CopyStrategy::kReceiver) row.flags |= plan::kFlagAwaitWindow;
    } else {
      const std::uint16_t from = builder.recv(0, number);
      plan::Row& row = builder.row(chunk, {from}, {}, lane);
      put(row, plan::Buffer::kOutput, chunk);
      row.flags = plan::kFlagFlush | plan::kFlagDirectWrite | plan::kFlagAnnounceWindow;
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
    request.output = {output, rank == 0 && manner_.gathers ? 0 : sender_.bytes()};
    request.descriptor.collective = manner_.gathers ? Collective::kGather : Collective::kBroadcast;
    if (manner_.gathers) request.counts.push_back(0);
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

// The number of segments that the sender of an operation writes directly. The same for operations
// that traverse memory forward and backward. During the first one the receiver maps the arena.
int written_by(World& world, std::size_t count, Manner manner) {
  constexpr std::uint64_t kOperations = 5;
  int written[kOperations + 1];
  for (std::uint64_t sequence = 1; sequence <= kOperations; ++sequence) {
    Transfer transfer(world, sequence, count, manner);
    const int before = world.direct_writes();
    transfer.begin(0);
    transfer.begin(1);
    transfer.finish();
    written[sequence] = world.direct_writes() - before;
    CHECK(sequence <= 2 || written[sequence] == written[2], "%d segments, then %d", written[2],
          written[sequence]);
  }
  return written[2];
}

}  // namespace

TEST(with_split_the_sender_writes_every_other_segment) {
  for (const std::uint32_t channels : {1u, 2u, 3u}) {
    for (int segments = 1; segments <= 5; ++segments) {
      Pair world;
      const std::size_t count = channels * (kSegmentCount * static_cast<std::size_t>(segments) - 7);
      const int written = written_by(world, count, {.channels = channels});
      // The last segment of an odd number is written on every other channel.
      const int channel_count = static_cast<int>(channels);
      const int wanted = channel_count * (segments / 2) + segments % 2 * (channel_count / 2);
      CHECK(written == wanted, "%d of %d segments on each of %d channels, not %d", written,
            segments, channel_count, wanted);
    }
  }
}

TEST(with_split_a_sender_that_copies_its_own_result_writes_nothing) {
  Pair world;
  CHECK(written_by(world, 4 * kSegmentCount, {.apart = true}) == 0, "the sender copies for both");
}

TEST(the_sender_or_the_receiver_copies_all_segments) {
  for (int segments = 1; segments <= 5; ++segments) {
    const std::size_t count = kSegmentCount * static_cast<std::size_t>(segments) - 7;
    for (const bool gathers : {false, true}) {
      Pair world;
      const Manner by_sender{.copies = plan::CopyStrategy::kSender, .gathers = gathers};
      const Manner by_receiver{.copies = plan::CopyStrategy::kReceiver, .gathers = gathers};
      const int all = written_by(world, count, by_sender);
      const int none = written_by(world, count, by_receiver);
      CHECK(all == segments, "%d of %d segments are written by the sender", all, segments);
      CHECK(none == 0, "%d segments are written by the sender", none);
    }
  }
}

TEST(a_receiver_without_a_window_reads_all_segments) {
  for (const auto copies : {plan::CopyStrategy::kSplit, plan::CopyStrategy::kSender}) {
    for (const std::uint32_t channels : {1u, 2u}) {
      Pair world;
      const Manner manner{.copies = copies, .channels = channels, .reachable = false};
      CHECK(written_by(world, 7 * channels * kSegmentCount, manner) == 0, "into which window?");
    }
  }
}

TEST(the_sender_waits_until_the_receiver_has_announced_its_window) {
  for (const std::uint32_t channels : {1u, 2u}) {
    Pair world;
    const std::size_t count = 6 * channels * kSegmentCount;
    written_by(world, count, {.channels = channels});
    const int before = world.direct_writes();
    Transfer transfer(world, 6, count, {.channels = channels});
    transfer.begin(0);
    for (int turn = 0; turn < 10; ++turn) (void)transfer.advance(0);
    transfer.begin(1);
    transfer.finish();
    const int written = world.direct_writes() - before;
    CHECK(written == 3 * static_cast<int>(channels), "%d segments", written);
  }
}

TEST(channels_may_be_read_in_another_order_than_they_are_filled) {
  for (int segments = 1; segments <= 3; ++segments) {
    Pair world;
    const std::size_t count = 2 * kSegmentCount * static_cast<std::size_t>(segments);
    const int written = written_by(world, count, {.channels = 2, .crossed = true});
    CHECK(written == segments, "%d of %d segments", written, segments);
  }
}

RUN_TESTS()
