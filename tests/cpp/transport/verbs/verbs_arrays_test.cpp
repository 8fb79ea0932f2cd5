// Collectives over verbs on arrays of the arena, which devices read where they lie: right results
// on a disorderly network, in place too, and that an operation lasts as long as its memory is read.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/engine/communicator_world.h"
#include "tests/cpp/support/arena_block.h"
#include "tests/cpp/transport/verbs/verbs_fixture.h"

namespace pycoll::testing {
namespace {

using engine::Communicator;

// Communicators of `size` ranks over the fake provider; those end before it does.
class VerbsWorld {
 public:
  VerbsWorld(int size, const FakeOptions& options, int rails = 1)
      : fake(options), transports_(fake_ranks(size, rails)) {
    for (int rank = 0; rank < size; ++rank) {
      engine::EngineOptions made;
      made.rank = rank;
      made.size = size;
      // Owned by transports_.
      made.transports.emplace_back(std::shared_ptr<void>(), &transports_.at(rank));
      made.clock = std::make_shared<SteadyClock>();
      Communicator::Handle communicator;
      const Status status = Communicator::create(std::move(made), &communicator);
      CHECK(status.ok(), "%s", status.message().c_str());
      ranks_.push_back(std::move(communicator));
    }
  }

  Communicator& at(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  // As if its process had been killed: its device answers nobody, its sockets end.
  void kill(int rank) {
    fake.cut(rank);
    transports_.kill(rank);
  }

  FakeVerbs fake;

 private:
  VerbsRanks transports_;
  std::vector<Communicator::Handle> ranks_;
};

// An array of the arena with a rank's values.
class Array : public Block {
 public:
  explicit Array(const std::vector<Element>& values) : Block(values.size() * sizeof(Element)) {
    assign(values);
  }
  void assign(const std::vector<Element>& values) { std::memcpy(data(), values.data(), bytes()); }
  bool holds(const std::vector<Element>& values) {
    return std::memcmp(data(), values.data(), bytes()) == 0;
  }
};

// The plan's collective from one array to another, or in place.
executor::CollectiveRequest request_in(PlanImage plan, Array& input, Array& output) {
  std::vector<Element> shape(input.bytes() / sizeof(Element));
  executor::CollectiveRequest request = all_reduce(std::move(plan), shape, shape);
  request.input.data = input.data();
  request.output.data = output.data();
  return request;
}

// Sums of several tiles, in place and not, on two kinds of plans, over one rail and over two.
TEST(sums_are_right_where_devices_read_the_arrays) {
  constexpr std::size_t kCount = 60'001;  // 480 KiB
  for (const int rails : {1, 2}) {
    for (const bool ring : {true, false}) {
      VerbsWorld world(3, {.seed = static_cast<std::uint64_t>(rails)}, rails);
      on_threads(ranks_below(3), [&](int rank) {
        const auto plan = ring ? ring_plan(3, rank) : direct_plan(3, rank);
        Array input(input_of(rank, 0, kCount));
        Array output(std::vector<Element>(kCount, 0));
        for (int round = 0; round < 4; ++round) {
          const bool in_place = round % 2 == 0;
          input.assign(input_of(rank, round, kCount));
          Array& result = in_place ? input : output;
          expect_ok(world.at(rank).run(request_in(plan, input, result), kPatience, nullptr),
                    "all_reduce");
          CHECK(result.holds(sum_of(3, round, kCount)), "rank %d, round %d: another sum", rank,
                round);
          // The operation is over, and the array its owner's.
          std::memset(result.data(), 0, result.bytes());
        }
        const std::uint64_t straight = world.fake.sent_from(input.data(), input.bytes());
        // Each contribution leaves from the array: one third of it once, or all of it twice.
        // The rest of it, less than a segment, may be too short for that.
        const std::uint64_t all = ring ? input.bytes() / 3 : 2 * input.bytes();
        const std::uint64_t least = all - 128 * 1024;
        CHECK(straight >= 4 * least, "rank %d: %llu bytes", rank,
              static_cast<unsigned long long>(straight));
      });
    }
  }
}

// The peer is through with the operation long before the device of rank 0 tells what it has sent.
TEST(an_operation_lasts_until_its_arrays_are_read) {
  constexpr std::size_t kCount = 20'000;
  VerbsWorld world(2, {.seed = 8});
  Array inputs[] = {Array(input_of(0, 0, kCount)), Array(input_of(1, 0, kCount))};
  Array outputs[] = {Array(input_of(0, 1, kCount)), Array(input_of(1, 1, kCount))};
  world.fake.hold_completions(0, true);
  std::vector<std::shared_ptr<engine::Operation>> operations;
  for (int rank = 0; rank < 2; ++rank) {
    operations.push_back(world.at(rank).start(
        request_in(direct_plan(2, rank), inputs[rank], outputs[rank]), kPatience));
  }
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  while (!operations[1]->done()) pause();
  for (int i = 0; i < 4; ++i) pause();
  CHECK(!operations[0]->done(), "over, but the device may repeat what it sent");
  world.fake.hold_completions(0, false);
  while (!operations[0]->done()) pause();
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(operations[static_cast<std::size_t>(rank)]->status().ok(), "rank %d failed", rank);
    CHECK(outputs[rank].holds(sum_of(2, 0, kCount)), "rank %d: another sum", rank);
  }
}

// Rank 2 takes no part and dies. The arrays that were on their way to it are the caller's again.
TEST(a_failed_sum_gives_its_arrays_back) {
  constexpr std::size_t kCount = 60'000;
  for (const bool ring : {true, false}) {
    VerbsWorld world(3, {.seed = 9});
    on_threads(ranks_below(3), [&](int rank) {
      if (rank == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return world.kill(2);
      }
      const auto plan = ring ? ring_plan(3, rank) : direct_plan(3, rank);
      Array array(input_of(rank, 0, kCount));
      const Status status = world.at(rank).run(request_in(plan, array, array), kPatience, nullptr);
      std::memset(array.data(), 0, array.bytes());
      CHECK(status.code() == Code::kPeerLost, "rank %d: %s", rank, status.message().c_str());
    });
  }
}

// Rank 1 passes on from its own array what has just arrived there.
TEST(a_whole_broadcast_leaves_from_arrays) {
  constexpr std::size_t kCount = 80 * 1024;  // ten segments
  VerbsWorld world(3, {.seed = 6});
  std::atomic<std::uint64_t> straight{0};
  on_threads(ranks_below(3), [&](int rank) {
    Array array(input_of(rank, 0, kCount));
    executor::CollectiveRequest request = request_in(chain_plan(rank, true), array, array);
    request.descriptor.collective = Collective::kBroadcast;
    if (rank != 0) request.input = {};
    expect_ok(world.at(rank).run(std::move(request), kPatience, nullptr), "broadcast");
    CHECK(array.holds(input_of(0, 0, kCount)), "rank %d: another array", rank);
    const std::uint64_t sent = world.fake.sent_from(array.data(), array.bytes());
    CHECK(sent == (rank < 2 ? array.bytes() : 0), "rank %d: %llu bytes", rank,
          static_cast<unsigned long long>(sent));
    straight += sent;
  });
  CHECK(straight.load() == world.fake.sent_bytes(), "the rest left from copies");
}

TEST(messages_leave_from_the_array) {
  VerbsWorld world(2, {.seed = 5});
  constexpr std::size_t kCount = 50'000;
  on_threads(ranks_below(2), [&](int rank) {
    Array array(input_of(0, 1, kCount));
    if (rank == 1) std::memset(array.data(), 0, array.bytes());
    using Kind = executor::MessageRequest::Kind;
    const executor::MessageRequest request{
        rank == 0 ? Kind::kSend : Kind::kRecv, 1 - rank, 4, {array.data(), array.bytes()}};
    expect_ok(world.at(rank).run(request, kPatience, nullptr), "message");
    CHECK(array.holds(input_of(0, 1, kCount)), "rank %d: another message", rank);
    if (rank == 1) return;
    CHECK(world.fake.sent_from(array.data(), array.bytes()) >= 6 * 65536, "copied");
    std::memset(array.data(), 0, array.bytes());
  });
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
