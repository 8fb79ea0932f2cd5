// Calls: collectives that are run again and again, by the ways that wait for nobody and those that
// wait.
#include <atomic>

#include "base/prng.h"
#include "tests/cpp/engine/communicator_world.h"
#include "tests/cpp/support/allocations.h"

using namespace pycoll;
using namespace pycoll::testing;
using engine::Call;
using engine::Communicator;
using engine::Operation;

namespace {

// An all_reduce of one rank that may be called with other memory.
struct Sum {
  Sum(Communicator& rank, std::size_t count, bool ring) : mine(rank), input(count), output(count) {
    const auto plan =
        ring ? ring_plan(rank.size(), rank.rank()) : direct_plan(rank.size(), rank.rank());
    call = std::make_shared<Call>(all_reduce(plan, input, output));
  }

  const std::byte* from() const { return reinterpret_cast<const std::byte*>(input.data()); }
  std::byte* to() { return reinterpret_cast<std::byte*>(output.data()); }

  // On the stack of the caller, as the bindings do; true if it was quick.
  bool run(Nanoseconds patience) {
    Operation operation;
    const std::shared_ptr<Operation> handle(std::shared_ptr<Operation>(), &operation);
    Status status;
    const bool quick =
        mine.brief().try_start(call, from(), to(), handle, kPatience, patience, false);
    if (!quick) {
      status = mine.run(engine::CallStart{call, from(), to(), handle}, kPatience, nullptr);
    } else if (operation.done()) {
      status = operation.status();
    } else {
      status = mine.drive(operation, kForever, nullptr);
    }
    expect_ok(status, "call");
    return quick;
  }

  Communicator& mine;
  std::vector<Element> input, output;
  std::shared_ptr<Call> call;
};

// A message that the caller waits for, as the bindings run it; true if it was quick.
bool run_message(Communicator& mine, const executor::MessageRequest& request,
                 Nanoseconds patience) {
  const auto operation = std::make_shared<Operation>();
  const bool quick = mine.brief().try_start(request, operation, kPatience, patience, false);
  expect_ok(
      quick ? mine.drive(*operation, kForever, nullptr) : mine.run(request, kPatience, nullptr),
      "message");
  return quick;
}

// Nobody may wait for it: the progress thread sees it through, whoever had the communicator just
// now.
void start_and_leave(Communicator& mine, const std::shared_ptr<Call>& call, const std::byte* from,
                     std::byte* to, const std::shared_ptr<Operation>& operation) {
  if (!mine.brief().try_start(call, from, to, operation, kPatience, 0, true)) {
    (void)mine.start(engine::CallStart{call, from, to, operation}, kPatience);
  }
}

}  // namespace

TEST(calls_give_the_sums_of_their_memory_again_and_again) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(3, fabric);
    on_threads(ranks_below(3), [&](int rank) {
      Sum first(world.at(rank), 100, true), second(world.at(rank), 7, false);
      for (int round = 0; round < 200; ++round) {
        Sum& sum = round % 3 == 0 ? second : first;
        const std::size_t count = sum.input.size();
        sum.input = input_of(rank, round, count);
        sum.output.assign(count, 0);
        sum.run(round % 2 == 0 ? 2000 : 0);
        CHECK(sum.output == sum_of(3, round, count), "rank %d, round %d", rank, round);
      }
    });
  }
}

TEST(messages_wait_for_nobody_and_calls_go_on_meanwhile) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::atomic<int> quick{0};
    on_threads({0, 1}, [&](int rank) {
      Communicator& mine = world.at(rank);
      Sum sum(mine, 5, false);
      std::vector<Element> late(3);
      const auto open = std::make_shared<Operation>();
      const bool left =
          mine.brief().try_start(recv_from(1 - rank, 9, late), open, kPatience, 0, true);
      CHECK(left && !open->done(), "the receive is open, and left to the progress thread");
      for (int round = 0; round < 100; ++round) {
        std::vector<Element> data = input_of(rank, round, 7), got(7);
        const Nanoseconds patience = round % 2 == 0 ? 2000 : 0;
        if (rank == 0) quick += run_message(mine, send_to(1, 3, data), patience) ? 1 : 0;
        (void)run_message(mine, recv_from(1 - rank, 3, got), patience);
        if (rank == 1) (void)run_message(mine, send_to(0, 3, data), patience);
        CHECK(got == input_of(1 - rank, round, 7), "rank %d, round %d", rank, round);
        sum.input = input_of(rank, round, 5);
        sum.run(patience);
        CHECK(sum.output == sum_of(2, round, 5), "rank %d, sum of round %d", rank, round);
      }
      std::vector<Element> data = input_of(rank, 1000, 3);
      (void)run_message(mine, send_to(1 - rank, 9, data), 2000);
      expect_ok(mine.drive(*open, kForever, nullptr), "the receive that was left");
      CHECK(late == input_of(1 - rank, 1000, 3), "what was left has come");
    });
    CHECK(quick > 0, "no send was quick");
  }
}

// Also where a medium gathers segments of this length until a poll.
TEST(a_send_that_is_left_leaves_at_once) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::vector<Element> data = input_of(0, 0, Call::kShortBytes / sizeof(Element));
    std::vector<Element> got(data.size());
    const auto operation = std::make_shared<Operation>();
    CHECK(world.at(0).brief().try_start(send_to(1, 2, data), operation, kPatience, 0, true),
          "not started");
    CHECK(operation->done(), "it waits for the progress thread");
    expect_ok(world.at(1).run(recv_from(0, 2, got), kPatience, nullptr), "recv");
    CHECK(got == data, "what arrived differs");
  }
}

TEST(nothing_starts_quickly_next_to_a_long_message) {
  CommunicatorWorld world(2, Fabric::kShm);
  std::vector<Element> data = input_of(0, 0, 1 << 16), got(1 << 16), brief(2);
  const auto open = world.at(0).start(recv_from(1, 3, got), kPatience);
  const auto operation = std::make_shared<Operation>();
  CHECK(!world.at(0).brief().try_start(recv_from(1, 4, brief), operation, kPatience, 0, false),
        "it would hold the caller's lock while a long message moves");
  expect_ok(world.at(1).run(send_to(0, 3, data), kPatience, nullptr), "send");
  expect_ok(world.at(0).drive(*open, kForever, nullptr), "recv");
  CHECK(got == data, "what arrived differs");
  const bool started =
      world.at(0).brief().try_start(recv_from(1, 4, brief), operation, kPatience, 0, false);
  expect_ok(world.at(1).run(send_to(0, 4, brief), kPatience, nullptr), "short send");
  if (started) expect_ok(world.at(0).drive(*operation, kForever, nullptr), "short recv");
}

TEST(a_call_that_is_bound_allocates_nothing) {
  CommunicatorWorld world(2, Fabric::kShm);
  std::atomic<int> ready{0};
  std::atomic<std::uint64_t> before{0};
  on_threads({0, 1}, [&](int rank) {
    Sum sum(world.at(rank), 16, false);
    for (int round = 0; round < 400; ++round) {
      if (round == 100) {
        ready.fetch_add(1);
        while (ready.load() < 2) std::this_thread::yield();
        if (rank == 0) before = allocations();
        ready.fetch_add(1);
        while (ready.load() < 4) std::this_thread::yield();
      }
      sum.run(2000);
    }
    ready.fetch_add(1);
    while (ready.load() < 6) std::this_thread::yield();
    const std::uint64_t made = allocations() - before.load();
    ready.fetch_add(1);
    while (ready.load() < 8) std::this_thread::yield();
    CHECK(made == 0, "%llu allocations in 300 rounds", static_cast<unsigned long long>(made));
  });
}

TEST(calls_that_nobody_waits_for_end_in_order_behind_requests) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    on_threads({0, 1}, [&](int rank) {
      Communicator& mine = world.at(rank);
      constexpr std::size_t kRounds = 60;
      std::vector<std::unique_ptr<Sum>> sums;
      std::vector<std::shared_ptr<Operation>> operations;
      Sum shared(mine, 20, true);  // one call, many times in the queue
      std::vector<std::vector<Element>> inputs(kRounds), outputs(kRounds);
      std::vector<Element> large(50'000), large_sum(50'000);
      for (std::size_t round = 0; round < kRounds; ++round) {
        if (round % 20 == 7) {
          const auto plan = ring_plan(2, rank);
          (void)mine.start(all_reduce(plan, large, large_sum), kPatience);
        }
        inputs[round] = input_of(rank, static_cast<int>(round), 20);
        outputs[round].resize(20);
        const auto* from = reinterpret_cast<const std::byte*>(inputs[round].data());
        auto* to = reinterpret_cast<std::byte*>(outputs[round].data());
        operations.push_back(std::make_shared<Operation>());
        start_and_leave(mine, shared.call, from, to, operations.back());
      }
      for (std::size_t round = kRounds; round-- > 0;) {
        mine.brief().try_drive(*operations[round], 1000);
        expect_ok(mine.drive(*operations[round], kForever, nullptr), "call");
        CHECK(outputs[round] == sum_of(2, static_cast<int>(round), 20), "rank %d, round %zu", rank,
              round);
      }
    });
  }
}

// Whatever runs along with what: results are those of one operation after the other.
TEST(calls_that_share_memory_behave_as_one_after_the_other) {
  constexpr std::size_t kBuffers = 4, kCount = 20, kRounds = 200;
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(3, fabric);
    std::vector<std::vector<std::vector<Element>>> data(3), model;
    for (int rank = 0; rank < 3; ++rank) {
      for (std::size_t buffer = 0; buffer < kBuffers; ++buffer) {
        data[static_cast<std::size_t>(rank)].push_back(
            input_of(rank, static_cast<int>(buffer), kCount));
      }
    }
    model = data;
    Prng random(7);
    std::vector<std::pair<std::size_t, std::size_t>> steps;
    for (std::size_t round = 0; round < kRounds; ++round) {
      const std::size_t from = random.below(kBuffers), to = random.below(kBuffers);
      steps.emplace_back(from, to);
      std::vector<Element> sum(kCount);
      for (const auto& mine : model) {
        for (std::size_t i = 0; i < kCount; ++i) sum[i] += mine[from][i];
      }
      for (auto& mine : model) mine[to] = sum;
    }
    on_threads(ranks_below(3), [&](int rank) {
      auto& mine = data[static_cast<std::size_t>(rank)];
      Sum ring(world.at(rank), kCount, true), direct(world.at(rank), kCount, false);
      std::vector<std::shared_ptr<Operation>> operations;
      for (const auto& [from, to] : steps) {
        operations.push_back(std::make_shared<Operation>());
        const Sum& sum = operations.size() % 3 == 0 ? ring : direct;
        start_and_leave(world.at(rank), sum.call,
                        reinterpret_cast<const std::byte*>(mine[from].data()),
                        reinterpret_cast<std::byte*>(mine[to].data()), operations.back());
      }
      for (const auto& operation : operations) {
        expect_ok(world.at(rank).drive(*operation, kForever, nullptr), "call");
      }
    });
    CHECK(data == model, "not as one after the other");
  }
}

TEST(a_world_of_one_runs_a_call_at_once) {
  CommunicatorWorld world(1, Fabric::kShm);
  PlanBuilder builder(Collective::kAllReduce, 1, 0);
  plan::Row& row = builder.row(0, {}, {});
  take(row, plan::Buffer::kInput, 0);
  put(row, plan::Buffer::kOutput, 0);
  const std::vector<Element> input = input_of(0, 1, 9);
  std::vector<Element> output(9);
  Call call(all_reduce(load(builder), input, output));
  const auto* from = reinterpret_cast<const std::byte*>(input.data());
  auto* to = reinterpret_cast<std::byte*>(output.data());
  Status status;
  CHECK(world.at(0).brief().try_alone(call, from, to, &status), "somebody else is there");
  expect_ok(status, "call");
  CHECK(output == input, "the sum of one differs");
  world.at(0).close();
  CHECK(!world.at(0).brief().try_alone(call, from, to, &status), "ran after the end");
}

TEST(a_call_that_was_left_ends_without_any_help) {
  CommunicatorWorld world(2, Fabric::kShm);
  Sum first(world.at(0), 5, false), second(world.at(1), 5, false);
  for (int round = 0; round < 20; ++round) {
    const auto one = std::make_shared<Operation>(), other = std::make_shared<Operation>();
    start_and_leave(world.at(0), first.call, first.from(), first.to(), one);
    CHECK(!one->done(), "over before its peer came");
    start_and_leave(world.at(1), second.call, second.from(), second.to(), other);
    while (!one->done() || !other->done()) std::this_thread::yield();
    expect_ok(one->status(), "first");
    expect_ok(other->status(), "second");
  }
}

TEST(calls_of_failed_and_closed_communicators_say_so) {
  CommunicatorWorld world(2, Fabric::kShm);
  Sum sum(world.at(0), 5, false);
  const auto open = std::make_shared<Operation>(), late = std::make_shared<Operation>();
  CHECK(world.at(0).brief().try_start(sum.call, sum.from(), sum.to(), open, kPatience, 0, true),
        "busy");
  world.at(0).close();
  CHECK(open->done() && open->status().code() == Code::kClosed, "still open");
  CHECK(!world.at(0).brief().try_start(sum.call, sum.from(), sum.to(), late, kPatience, 0, true),
        "started after the end");
  const Status status =
      world.at(0).run(engine::CallStart{sum.call, sum.from(), sum.to(), late}, kPatience, nullptr);
  CHECK(status.code() == Code::kClosed, "%s", status.message().c_str());
}

TEST(a_call_for_another_rank_is_refused) {
  CommunicatorWorld world(2, Fabric::kShm);
  Sum sum(world.at(0), 5, false);
  const auto operation = std::make_shared<Operation>();
  const Status status = world.at(1).run(
      engine::CallStart{sum.call, sum.from(), sum.to(), operation}, kPatience, nullptr);
  CHECK(status.code() == Code::kInvalidArgument, "%s", status.message().c_str());
  expect_ok(world.at(1).failure(), "failure");
}

RUN_TESTS()
