// Direct writes over real shared memory: which windows open, which do not, and that results stay
// the same. All ranks are stepped by one thread.
#include "executor/execution.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "tests/cpp/executor/direct_write_world.h"
#include "tests/cpp/plan/collective_plans.h"
#include "tests/cpp/support/arena_block.h"

using namespace pycoll;
using namespace pycoll::testing;
using executor::Execution;
using executor::Progress;

namespace {

constexpr std::size_t kSegment = transport::kSegmentBytesMax;

// Operation number `sequence`, an all_reduce round the ring. Memory is the arena's if `reachable`.
class Sum {
 public:
  Sum(World& world, std::uint64_t sequence, std::size_t count, bool reachable, bool in_place)
      : world_(&world), sequence_(sequence), count_(count), runs_(runs_of(world.size())) {
    for (Run& run : runs_) {
      run.input.resize(in_place ? 0 : count);
      if (reachable) run.block = std::make_unique<Block>(count * sizeof(Element));
      if (!reachable) run.output.resize(count);
    }
  }

  void begin(int rank, std::vector<executor::Part> parts = {}) {
    Run& run = at(rank);
    const std::vector<Element> values = input_of(rank, round(), count_);
    Element* output = memory(rank);
    Element* input = run.input.empty() ? output : run.input.data();
    std::memcpy(input, values.data(), count_ * sizeof(Element));
    executor::CollectiveRequest request =
        all_reduce(direct_write_ring_plan(world_->size(), rank), values, run.output);
    request.input = {reinterpret_cast<std::byte*>(input), count_ * sizeof(Element)};
    request.output = {reinterpret_cast<std::byte*>(output), count_ * sizeof(Element)};
    request.segment_bytes = kSegment;
    request.parts = std::move(parts);
    const Status status = run.execution.start(std::move(request), sequence_, world_->at(rank));
    CHECK(status.ok(), "%s", status.message().c_str());
  }
  void begin_all() {
    for (int rank = 0; rank < world_->size(); ++rank) begin(rank);
  }
  Progress advance(int rank) { return at(rank).execution.advance(); }
  void finish() {
    bool done = false;
    for (int turn = 0; turn < 100'000 && !done; ++turn) {
      done = true;
      for (int rank = 0; rank < world_->size(); ++rank) {
        const Progress progress = advance(rank);
        CHECK(progress != Progress::kDisagree, "rank %d disagrees", rank);
        done &= progress == Progress::kDone;
      }
    }
    CHECK(done, "operation %llu hangs", static_cast<unsigned long long>(sequence_));
    const std::vector<Element> wanted = sum_of(world_->size(), round(), count_);
    for (int rank = 0; rank < world_->size(); ++rank) {
      CHECK(std::equal(wanted.begin(), wanted.end(), memory(rank)), "rank %d has another sum",
            rank);
    }
  }
  Element* memory(int rank) {
    Run& run = at(rank);
    return run.block == nullptr ? run.output.data() : reinterpret_cast<Element*>(run.block->data());
  }

 private:
  struct Run {
    std::vector<Element> input, output;
    std::unique_ptr<Block> block;
    Execution execution;
  };

  static std::vector<Run> runs_of(int size) {
    return std::vector<Run>(static_cast<std::size_t>(size));
  }
  int round() const { return static_cast<int>(sequence_); }
  Run& at(int rank) { return runs_[static_cast<std::size_t>(rank)]; }

  World* world_;
  std::uint64_t sequence_;
  std::size_t count_;
  std::vector<Run> runs_;
};

// Every chunk has three tiles, the last one shorter.
std::size_t count_for(int size) {
  return static_cast<std::size_t>(size) * (5 * kSegment / 2) / sizeof(Element);
}
// Of one ring: who receives a chunk for the second time gets three segments.
int all_segments(int size) { return 3 * size * (size - 1); }

}  // namespace

TEST(results_are_written_directly_into_reachable_memory) {
  for (const int size : {2, 3, 5}) {
    for (const bool in_place : {true, false}) {
      World world(size);
      for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
        Sum sum(world, sequence, count_for(size), true, in_place);
        sum.begin_all();
        sum.finish();
        CHECK(world.direct_writes() == static_cast<int>(sequence) * all_segments(size),
              "%d ranks: %d segments were written directly in %llu operations", size,
              world.direct_writes(), static_cast<unsigned long long>(sequence));
      }
    }
  }
}

TEST(ordinary_memory_and_short_segments_get_copies) {
  World world(3);
  Sum ordinary(world, 1, count_for(3), false, true);
  ordinary.begin_all();
  ordinary.finish();
  Sum brief(world, 2, 3 * transport::kUncopiedBytesMin / sizeof(Element) - 3, true, true);
  brief.begin_all();
  brief.finish();
  CHECK(world.direct_writes() == 0, "%d segments were written directly", world.direct_writes());
}

TEST(who_has_not_begun_offers_nothing) {
  World world(2);
  Sum sum(world, 1, count_for(2), true, true);
  sum.begin(0);
  for (int turn = 0; turn < 10; ++turn) (void)sum.advance(0);
  sum.begin(1);
  sum.finish();
  CHECK(world.direct_writes() == all_segments(2), "%d segments were written directly",
        world.direct_writes());
  Sum mixed(world, 2, count_for(2), false, true);
  mixed.begin_all();
  mixed.finish();
  CHECK(world.direct_writes() == all_segments(2), "%d segments were written directly",
        world.direct_writes());
}

TEST(of_operations_side_by_side_the_newest_has_its_results_written_directly) {
  World world(2);
  Sum first(world, 1, count_for(2), true, true);
  Sum second(world, 2, count_for(2), true, true);
  first.begin_all();
  second.begin_all();
  first.finish();
  CHECK(world.direct_writes() == 0, "%d segments of the first were written directly",
        world.direct_writes());
  second.finish();
  CHECK(world.direct_writes() == all_segments(2), "%d segments were written directly",
        world.direct_writes());
}

TEST(memory_in_parts_gets_copies) {
  World world(2);
  const std::size_t count = count_for(2);
  Sum sum(world, 1, count, true, true);
  sum.begin(0);
  auto* memory = reinterpret_cast<std::byte*>(sum.memory(1));
  const std::size_t half = count / 2 * sizeof(Element);
  sum.begin(1, {{memory, memory, half}, {memory + half, memory + half, 2 * half}});
  sum.finish();
  CHECK(world.direct_writes() == all_segments(2) / 2, "%d segments were written directly",
        world.direct_writes());
}

RUN_TESTS()
