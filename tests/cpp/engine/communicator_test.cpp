// Communicators as users have them: real threads over shared memory and TCP streams.
#include "engine/communicator.h"

#include <atomic>
#include <chrono>
#include <mutex>

#include "tests/cpp/engine/communicator_world.h"

using namespace pycoll;
using namespace pycoll::testing;
using engine::Communicator;
using engine::Operation;

namespace {

void all_reduce_once(Communicator& rank, int round, std::size_t count, bool ring) {
  const auto plan =
      ring ? ring_plan(rank.size(), rank.rank()) : direct_plan(rank.size(), rank.rank());
  std::vector<Element> data = input_of(rank.rank(), round, count);
  std::vector<Element> result(count);
  const bool in_place = round % 3 == 0;
  std::vector<Element>& output = in_place ? data : result;
  expect_ok(rank.run(all_reduce(plan, data, output), kPatience, nullptr), "all_reduce");
  CHECK(output == sum_of(rank.size(), round, count), "rank %d, round %d, %zu elements, ring %d",
        rank.rank(), round, count, ring);
}

// Sends and receives `rounds` messages with `tag`, first started, then driven.
void talk(Communicator& rank, int peer, std::uint32_t tag, int rounds) {
  const int salt = static_cast<int>(tag) * 1000;
  for (int round = 0; round < rounds; ++round) {
    const std::size_t count = round % 4 == 0 ? 0 : static_cast<std::size_t>(round) * 977;
    std::vector<Element> sent = input_of(rank.rank(), salt + round, count);
    std::vector<Element> got(count);
    const auto recv = rank.start(recv_from(peer, tag, got), kPatience);
    if (round % 2 == 0) {
      expect_ok(rank.run(send_to(peer, tag, sent), kPatience, nullptr), "send");
      expect_ok(rank.drive(*recv, kForever, nullptr), "recv");
    } else {
      const auto send = rank.start(send_to(peer, tag, sent), kPatience);
      while (!recv->done() || !send->done()) {
        (void)rank.drive(*recv, 1'000'000, nullptr);
        (void)rank.drive(*send, 1'000'000, nullptr);
      }
      expect_ok(send->status(), "send");
      expect_ok(recv->status(), "recv");
    }
    CHECK(got == input_of(peer, salt + round, count), "rank %d, tag %u, round %d", rank.rank(), tag,
          round);
  }
}

}  // namespace

TEST(blocking_operations_of_many_ranks_are_exact) {
  constexpr std::size_t kCounts[] = {0, 1, 7, 1000, 40'000};
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(4, fabric);
    on_threads(ranks_below(4), [&](int rank) {
      for (int round = 0; round < 20; ++round) {
        all_reduce_once(world.at(rank), round, kCounts[round % 5], round % 2 == 0);
      }
    });
  }
}

// Ten ranks on the few cores of any test machine: waiting must give the core away.
TEST(more_ranks_than_cores_make_progress) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(10, fabric);
    on_threads(ranks_below(10), [&](int rank) {
      for (int round = 0; round < 5; ++round) all_reduce_once(world.at(rank), round, 300, true);
    });
  }
}

TEST(threads_of_one_rank_mix_collectives_messages_and_starts) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    on_threads({0, 1}, [&](int rank) {
      Communicator& mine = world.at(rank);
      std::vector<std::thread> threads;
      threads.emplace_back([&] {
        for (int round = 0; round < 15; ++round) all_reduce_once(mine, round, 5000, round % 2 == 0);
      });
      for (std::uint32_t tag = 1; tag <= 3; ++tag) {
        threads.emplace_back([&mine, rank, tag] { talk(mine, 1 - rank, tag, 12); });
      }
      for (std::thread& thread : threads) thread.join();
      expect_ok(mine.failure(), "failure");
    });
  }
}

TEST(operations_that_nobody_waits_for_end_in_order) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(3, fabric);
    on_threads(ranks_below(3), [&](int rank) {
      constexpr int kRounds = 12;
      std::vector<std::vector<Element>> inputs, outputs(kRounds);
      for (int round = 0; round < kRounds; ++round) {
        inputs.push_back(input_of(rank, round, 3000));
        outputs[static_cast<std::size_t>(round)].resize(3000);
      }
      for (std::size_t round = 0; round < kRounds; ++round) {
        const auto plan = round % 2 == 0 ? ring_plan(3, rank) : direct_plan(3, rank);
        (void)world.at(rank).start(all_reduce(plan, inputs[round], outputs[round]), kPatience);
      }
      // The last one ends after all those before.
      all_reduce_once(world.at(rank), 99, 10, true);
      for (std::size_t round = 0; round < kRounds; ++round) {
        CHECK(outputs[round] == sum_of(3, static_cast<int>(round), 3000), "rank %d, round %zu",
              rank, round);
      }
    });
  }
}

TEST(a_started_operation_ends_without_any_help) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::vector<Element> sent = input_of(0, 1, 100'000), got(100'000);
    const auto recv = world.at(1).start(recv_from(0, 4, got), kPatience);
    const auto send = world.at(0).start(send_to(1, 4, sent), kPatience);
    while (!recv->done() || !send->done())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    expect_ok(recv->status(), "recv");
    expect_ok(send->status(), "send");
    CHECK(got == sent, "what arrived differs");
  }
}

TEST(patience_that_ends_first_leaves_the_operation_running) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::vector<Element> sent = input_of(0, 1, 20), got(20);
    const auto recv = world.at(1).start(recv_from(0, 4, got), kPatience);
    SteadyClock clock;
    const Nanoseconds begin = clock.now();
    expect(world.at(1).drive(*recv, 30'000'000, nullptr), Code::kTimeout, {}, "drive");
    CHECK(clock.now() - begin >= 30'000'000, "patience ended early");
    expect(world.at(1).drive(*recv, 0, nullptr), Code::kTimeout, {}, "drive without patience");
    CHECK(!recv->done(), "a wait's timeout ended the operation");
    expect_ok(world.at(0).run(send_to(1, 4, sent), kPatience, nullptr), "send");
    expect_ok(world.at(1).drive(*recv, kForever, nullptr), "recv");
    CHECK(got == sent, "what arrived differs");
  }
}

// Several threads wait for operations that end in another order than they were started in: each one
// is told, whoever drives.
TEST(every_thread_learns_of_its_own_end) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    constexpr std::uint32_t kThreads = 5;
    for (int round = 0; round < 10; ++round) {
      std::atomic<std::uint32_t> ended{0};
      std::vector<std::thread> threads;
      std::vector<std::vector<Element>> got(kThreads, std::vector<Element>(3));
      for (std::uint32_t tag = 0; tag < kThreads; ++tag) {
        threads.emplace_back([&, tag] {
          expect_ok(world.at(1).run(recv_from(0, tag, got[tag]), kPatience, nullptr), "recv");
          ++ended;
        });
      }
      for (std::uint32_t i = 0; i < kThreads; ++i) {
        const std::uint32_t tag = (i * 2 + static_cast<std::uint32_t>(round)) % kThreads;
        std::vector<Element> sent = input_of(0, static_cast<int>(tag), 3);
        expect_ok(world.at(0).run(send_to(1, tag, sent), kPatience, nullptr), "send");
        while (ended <= i) std::this_thread::yield();  // hangs if that thread is not told
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}

// An operation that moves all the time must not keep other threads out until it ends.
TEST(a_busy_driver_lets_other_threads_in) {
  CommunicatorWorld world(1, Fabric::kShm);
  PlanBuilder builder(Collective::kAllReduce, 1, 0);
  plan::Row& row = builder.row(0, {}, {});
  take(row, plan::Buffer::kInput, 0);
  put(row, plan::Buffer::kOutput, 0);
  const PlanImage plan = load(builder);
  std::vector<Element> data = input_of(0, 0, 1 << 21), result(1 << 21);
  std::atomic<bool> running{false}, over{false};
  std::thread busy([&] {
    running = true;
    // Two million tiles of one element each.
    executor::CollectiveRequest request = all_reduce(plan, data, result);
    request.segment_bytes = 8;
    expect_ok(world.at(0).run(std::move(request), kPatience, nullptr), "all_reduce");
    over = true;
  });
  while (!running) std::this_thread::yield();
  int calls = 0;
  while (!over) {
    expect_ok(world.at(0).failure(), "failure");
    ++calls;
  }
  busy.join();
  CHECK(result == data, "the result differs");
  CHECK(calls >= 10, "%d calls got in", calls);
}

TEST(what_cannot_be_is_refused_and_leaves_no_trace) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    on_threads({0, 1}, [&](int rank) {
      std::vector<Element> data(4), result(3);
      const auto refused = [&](const Status& status, const char* text,
                               const std::vector<int>& ranks = {}) {
        expect(status, Code::kInvalidArgument, ranks, text);
        CHECK(status.message().find(text) != std::string::npos, "%s", status.message().c_str());
      };
      all_reduce_once(world.at(rank), 0, 10, true);
      if (rank == 0) {
        Communicator& mine = world.at(0);
        refused(mine.run(all_reduce(ring_plan(2, 1), data, data), kPatience, nullptr),
                "the plan is for rank 1 of 2, this is rank 0 of 2", {0});
        refused(mine.run(all_reduce(ring_plan(2, 0), data, result), kPatience, nullptr),
                "output has 24 bytes, 32 were expected", {0});
        refused(mine.start(send_to(2, 0, data), kPatience)->status(),
                "peer is 2: expected a rank from 0 to 1");
        refused(mine.start(recv_from(-2, 0, data), kPatience)->status(), "peer is -2");
      } else {
        // The collectives count, and the other rank hears of them.
        for (int call = 0; call < 2; ++call) {
          refused(world.at(1).run(all_reduce(ring_plan(2, 1), data, data), kPatience, nullptr),
                  "has refused its arguments of operation", {0});
        }
      }
      all_reduce_once(world.at(rank), 1, 10, false);
    });
  }
}

TEST(a_communicator_needs_a_transport_to_every_peer) {
  engine::EngineOptions options;
  options.size = 2;
  options.clock = std::make_shared<SteadyClock>();
  options.transports.push_back(make_shm(0, 2));
  Communicator::Handle made;
  const Status status = Communicator::create(options, &made);
  expect(status, Code::kInvalidArgument, {1}, "create");
  CHECK(status.message() == "rank 0 has no transport to rank 1", "%s", status.message().c_str());
  options.rank = 2;
  expect(Communicator::create(options, &made), Code::kInvalidArgument, {}, "create");
  CHECK(made == nullptr, "a failed create made something");
}

RUN_TESTS()
