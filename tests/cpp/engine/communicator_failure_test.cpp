// How communicators end: closed, failed, interrupted, forked; while other threads use them.
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>

#include "engine/communicator.h"
#include "tests/cpp/engine/communicator_world.h"
#include "tests/cpp/support/process_entries.h"

using namespace pycoll;
using namespace pycoll::testing;
using engine::Communicator;

namespace {

// Threads that wait for messages which never come, a collective without the others, and one that
// only started something.
class Waiting {
 public:
  explicit Waiting(Communicator& rank) : rank_(rank), data_(kThreads + 2, std::vector<Element>(5)) {
    started_ = rank.start(recv_from(1, 100, data_[kThreads]), kPatience);
    for (std::uint32_t tag = 0; tag < kThreads; ++tag) {
      threads_.emplace_back(
          [this, tag] { add(rank_.run(recv_from(1, tag, data_[tag]), kPatience, nullptr)); });
    }
    threads_.emplace_back([this] {
      std::vector<Element>& data = data_[kThreads + 1];
      const auto plan = ring_plan(rank_.size(), rank_.rank());
      add(rank_.run(all_reduce(plan, data, data), kPatience, nullptr));
    });
  }

  std::vector<Status> join() {
    for (std::thread& thread : threads_) thread.join();
    CHECK(started_->done(), "the started operation has not ended");
    statuses_.push_back(started_->status());
    return statuses_;
  }

 private:
  static constexpr std::uint32_t kThreads = 3;

  void add(const Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    statuses_.push_back(status);
  }

  Communicator& rank_;
  std::vector<std::vector<Element>> data_;
  std::shared_ptr<engine::Operation> started_;
  std::mutex mutex_;
  std::vector<Status> statuses_;
  std::vector<std::thread> threads_;
};

}  // namespace

TEST(close_ends_what_runs_in_other_threads) {
  for (const Fabric fabric : kFabrics) {
    for (int round = 0; round < 8; ++round) {
      CommunicatorWorld world(2, fabric);
      Waiting waiting(world.at(0));
      std::this_thread::sleep_for(std::chrono::milliseconds(round * 5));
      std::thread other([&] { world.at(0).close(); });
      world.at(0).close();
      world.at(0).close();
      other.join();
      for (const Status& status : waiting.join()) expect(status, Code::kClosed, {}, "closed");
      std::vector<Element> data(3);
      expect(world.at(0).run(send_to(1, 0, data), kPatience, nullptr), Code::kClosed, {}, "run");
      expect(world.at(0).start(send_to(1, 0, data), kPatience)->status(), Code::kClosed, {},
             "start");
      expect(world.at(0).failure(), Code::kClosed, {}, "failure");
      // The peer that needs it now says who has left.
      const Status left = world.at(1).run(recv_from(0, 0, data), kPatience, nullptr);
      expect(left, Code::kPeerLost, {0}, "recv");
      CHECK(left.message() ==
                "rank 0 was lost during recv from rank 0 with tag 0: it closed its communicator "
                "before the operation was done",
            "%s", left.message().c_str());
    }
  }
}

TEST(close_ends_a_whole_queue) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::vector<std::vector<Element>> data(10, std::vector<Element>(1000));
    std::vector<std::shared_ptr<engine::Operation>> queue;
    for (auto& one : data) {
      queue.push_back(world.at(0).start(all_reduce(ring_plan(2, 0), one, one), kPatience));
    }
    world.drop(0);
    for (const auto& operation : queue) {
      CHECK(operation->done(), "an operation outlived its communicator");
      expect(operation->status(), Code::kClosed, {}, "queued");
    }
  }
}

TEST(what_a_rank_sent_before_it_closed_still_arrives) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::vector<Element> first = input_of(0, 1, 900), second = input_of(0, 2, 5);
    std::vector<Element> got_first(900), got_second(5);
    expect_ok(world.at(0).run(send_to(1, 1, first), kPatience, nullptr), "send");
    expect_ok(world.at(0).run(send_to(1, 2, second), kPatience, nullptr), "send");
    world.drop(0);
    expect_ok(world.at(1).run(recv_from(0, 2, got_second), kPatience, nullptr), "recv");
    expect_ok(world.at(1).run(recv_from(0, 1, got_first), kPatience, nullptr), "recv");
    CHECK(got_first == first && got_second == second, "what arrived differs");
    expect(world.at(1).run(recv_from(0, 3, got_first), kPatience, nullptr), Code::kPeerLost, {0},
           "a message that was never sent");
  }
}

// Every survivor names the dead rank, in one way, also those that only heard of it from another
// survivor that has closed meanwhile.
TEST(a_death_is_told_to_all_and_the_dead_one_is_named) {
  for (const Fabric fabric : kFabrics) {
    for (int victim = 0; victim < 4; ++victim) {
      CommunicatorWorld world(4, fabric);
      std::vector<int> survivors = ranks_below(4);
      survivors.erase(survivors.begin() + victim);
      std::thread killer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(10 * victim));
        world.kill(victim);
      });
      on_threads(survivors, [&](int rank) {
        std::vector<Element> data = input_of(rank, 0, 2000);
        const auto request = all_reduce(ring_plan(4, rank), data, data);
        const Status status = world.at(rank).run(request, kPatience, nullptr);
        expect(status, Code::kPeerLost, {victim}, "all_reduce");
        const Status again = world.at(rank).run(request, kPatience, nullptr);
        expect(again, Code::kPeerLost, {victim}, "afterwards");
        CHECK(again.message() == "the communicator has failed: " + status.message(), "%s",
              again.message().c_str());
        world.drop(rank);  // others may see this end before they hear why
      });
      killer.join();
    }
  }
}

TEST(a_rank_that_closes_midway_is_named_by_all) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(4, fabric);
    on_threads(ranks_below(4), [&](int rank) {
      if (rank == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        world.at(2).close();
        return;
      }
      std::vector<Element> data = input_of(rank, 0, 2000);
      expect(world.at(rank).run(all_reduce(ring_plan(4, rank), data, data), kPatience, nullptr),
             Code::kPeerLost, {2}, "all_reduce");
    });
  }
}

// A device of one rank finds them; the others may be anywhere else.
TEST(codes_that_do_not_decode_are_told_to_all) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(3, fabric);
    on_threads(ranks_below(3), [&](int rank) {
      if (rank == 0) {
        const Status found = Status::error(Code::kReduction, "rank 2 sent wrong codes", {2});
        expect(world.at(0).on_stream().fail(found, "device all_reduce", 0), Code::kReduction, {2},
               "the rank that found them");
        return;
      }
      std::vector<Element> data = input_of(rank, 0, 100);
      const auto request = all_reduce(ring_plan(3, rank), data, data);
      const Status status = world.at(rank).run(request, kPatience, nullptr);
      expect(status, Code::kReduction, {2}, "all_reduce");
      CHECK(status.message().starts_with(
                "rank 2 sent codes of an array on a device that do not decode: "),
            "%s", status.message().c_str());
      expect(world.at(rank).failure(), Code::kReduction, {2}, "afterwards");
    });
  }
}

TEST(an_interrupted_rank_stops_and_is_named_by_the_others) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(3, fabric);
    on_threads({0, 1}, [&](int rank) {
      std::vector<Element> data = input_of(rank, 0, 100);
      const auto request = all_reduce(ring_plan(3, rank), data, data);
      if (rank == 1) {
        expect(world.at(1).run(request, kPatience, nullptr), Code::kPeerLost, {0}, "all_reduce");
        return;
      }
      int asked = 0;
      const Status status = world.at(0).run(request, kPatience, [&] { return ++asked == 3; });
      expect(status, Code::kInterrupted, {}, "all_reduce");
      CHECK(asked == 3, "asked %d times", asked);
      CHECK(status.message() == "interrupted during operation 1 (all_reduce of 100 uint64, op sum)",
            "%s", status.message().c_str());
    });
  }
}

// While one thread asks whether it is interrupted, which may take long, another one drives.
TEST(a_thread_that_is_being_asked_does_not_hold_others_up) {
  CommunicatorWorld world(2, Fabric::kShm);
  std::vector<Element> never(1), got(4), sent = input_of(0, 0, 4);
  std::atomic<bool> asking{false}, release{false};
  std::thread first([&] {
    const auto interrupted = [&] {
      asking = true;
      while (!release) std::this_thread::yield();
      return true;
    };
    expect(world.at(1).run(recv_from(0, 1, never), kPatience, interrupted), Code::kInterrupted, {},
           "recv that never ends");
  });
  while (!asking) std::this_thread::yield();
  std::thread sender(
      [&] { expect_ok(world.at(0).run(send_to(1, 2, sent), kPatience, nullptr), "send"); });
  expect_ok(world.at(1).run(recv_from(0, 2, got), kPatience, nullptr), "recv");
  const auto started = world.at(1).start(recv_from(0, 3, got), kPatience);
  sender.join();
  expect_ok(world.at(0).run(send_to(1, 3, sent), kPatience, nullptr), "send");
  while (!started->done()) std::this_thread::yield();
  expect_ok(started->status(), "the progress thread goes on");
  release = true;
  first.join();
}

TEST(a_deadline_is_told_in_the_same_words) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(4, fabric);
    std::mutex mutex;
    std::set<std::string> texts;
    on_threads({0, 2}, [&](int rank) {
      std::vector<Element> data = input_of(rank, 0, 10);
      const Nanoseconds timeout = rank == 0 ? kSecond / 2 : kPatience;
      const Status status =
          world.at(rank).run(all_reduce(direct_plan(4, rank), data, data), timeout, nullptr);
      expect(status, Code::kTimeout, {1, 3}, "all_reduce");
      const std::lock_guard<std::mutex> lock(mutex);
      texts.insert(status.message());
    });
    CHECK(texts.size() == 1, "%s / %s", texts.begin()->c_str(), texts.rbegin()->c_str());
    CHECK(*texts.begin() ==
              "operation 1 (all_reduce of 10 uint64, op sum) did not finish within "
              "0.5 s: ranks 1 and 3 did not arrive",
          "%s", texts.begin()->c_str());
  }
}

// Deadlines are looked at even while something else moves without a pause.
TEST(a_flood_of_messages_does_not_stop_the_clock) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::thread flood([&] {
      std::vector<Element> data(1000);
      while (world.at(0).run(send_to(1, 1, data), kPatience, nullptr).ok()) {
      }
    });
    std::thread drain([&] {
      std::vector<Element> data(1000);
      while (world.at(1).run(recv_from(0, 1, data), kPatience, nullptr).ok()) {
      }
    });
    std::vector<Element> never(1);
    const Status status = world.at(1).run(recv_from(0, 2, never), kSecond / 5, nullptr);
    expect(status, Code::kTimeout, {0}, "a message that never comes");
    flood.join();
    drain.join();
  }
}

// A failed reduction: the rank itself stops, the others hear whose it was, and nobody gets what it
// left.
TEST(a_reduction_that_fails_ends_the_operation_everywhere) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(3, fabric);
    std::atomic<bool> failed{false};
    on_threads(ranks_below(3), [&](int rank) {
      std::vector<Element> data = input_of(rank, 0, 50'000);
      auto request = all_reduce(ring_plan(3, rank), data, data);
      if (rank == 1) {
        request.reduction_failed = &failed;
        request.combine = {[](void*, const void* const*, int, std::size_t, void* context) {
                             *static_cast<std::atomic<bool>*>(context) = true;
                           },
                           &failed};
      }
      const Status status = world.at(rank).run(std::move(request), kPatience, nullptr);
      if (rank == 1) {
        expect(status, Code::kInterrupted, {}, "all_reduce");
      } else {
        expect(status, Code::kPeerLost, {1}, "all_reduce");
        CHECK(status.message().find("its reduction raised an error") != std::string::npos, "%s",
              status.message().c_str());
      }
    });
  }
}

TEST(nothing_is_left_behind) {
  const std::size_t threads = entries(kTaskFolder);
  {
    CommunicatorWorld world(2, Fabric::kShm);
  }  // what the first use makes once
  await_threads(threads);
  const std::size_t descriptors = entries(kDescriptorFolder);
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(3, fabric);
    std::vector<std::vector<Element>> data(3, std::vector<Element>(9));
    std::vector<std::shared_ptr<engine::Operation>> started;
    for (int rank = 0; rank < 3; ++rank) {
      auto& mine = data[static_cast<std::size_t>(rank)];
      started.push_back(
          world.at(rank).start(all_reduce(ring_plan(3, rank), mine, mine), kPatience));
    }
    CHECK(entries(kTaskFolder) == threads + 3, "one progress thread each");
    for (const auto& operation : started) {
      while (!operation->done()) std::this_thread::yield();
    }
  }
  CHECK(entries(kDescriptorFolder) == descriptors, "%s: descriptors are left", "worlds");
  await_threads(threads);
}

namespace {

// What a forked child sees; its exit code is the number of the first thing that was wrong.
int child_of(CommunicatorWorld& world, const engine::Operation& running) {
  std::vector<Element> data(3);
  Communicator& mine = world.at(0);
  if (mine.run(send_to(1, 1, data), kPatience, nullptr).code() != Code::kClosed) return 1;
  const auto started = mine.start(send_to(1, 1, data), kPatience);
  if (!started->done() || started->status().code() != Code::kClosed) return 2;
  if (mine.drive(running, kForever, nullptr).code() != Code::kClosed) return 3;
  if (mine.failure().code() != Code::kClosed) return 4;
  if (mine.failure().message().find("forked child") == std::string::npos) return 5;
  mine.close();
  world.drop(0);  // must return, and leave the parent's side alone
  return 0;
}

}  // namespace

// The parent is forked while its progress thread and other threads are busy with the locks.
TEST(a_forked_child_is_refused_and_the_parent_goes_on) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::vector<Element> waits(3), sent = input_of(1, 5, 3);
    const auto running = world.at(0).start(recv_from(1, 7, waits), kPatience);
    std::atomic<bool> over{false};
    std::thread busy([&] {
      while (!over) (void)world.at(0).drive(*running, 100'000, nullptr);
    });
    for (int round = 0; round < 10; ++round) {
      const pid_t child = ::fork();
      CHECK(child >= 0, "cannot fork");
      if (child == 0) std::_Exit(child_of(world, *running));
      int state = 0;
      CHECK(::waitpid(child, &state, 0) == child, "no child to wait for");
      CHECK(WIFEXITED(state) && WEXITSTATUS(state) == 0, "round %d: the child ended with %d", round,
            state);
    }
    over = true;
    busy.join();
    CHECK(!running->done(), "a child ended the parent's operation");
    expect_ok(world.at(1).run(send_to(0, 7, sent), kPatience, nullptr), "send");
    expect_ok(world.at(0).drive(*running, kForever, nullptr), "recv");
    CHECK(waits == sent, "what arrived differs");
  }
}

// A peer may have sent more messages than a step takes, and then left in good order.
TEST(what_a_rank_sent_before_it_left_is_received) {
  constexpr std::uint32_t kMessages = 20;
  SocketPair pair = unix_pair();
  std::vector<UniqueFd> ends;
  ends.push_back(std::move(pair.near));
  ends.push_back(std::move(pair.far));
  std::vector<std::unique_ptr<engine::Engine>> engines(2);
  for (int rank = 0; rank < 2; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    auto tcp = std::make_shared<transport::TcpTransport>(rank, 2);
    std::vector<UniqueFd> sockets;
    sockets.push_back(std::move(ends[index]));
    CHECK(tcp->attach(1 - rank, std::move(sockets), "peer").ok(), "not attached");
    engine::EngineOptions options;
    options.rank = rank;
    options.size = 2;
    options.transports.push_back(std::move(tcp));
    options.clock = std::make_shared<SteadyClock>();
    CHECK(engine::Engine::create(std::move(options), &engines[index]).ok(), "rank %d", rank);
  }
  std::vector<std::vector<Element>> sent, got(kMessages, std::vector<Element>(3));
  for (std::uint32_t tag = 0; tag < kMessages; ++tag) {
    sent.push_back(input_of(1, static_cast<int>(tag), 3));
    CHECK(engines[1]->start(send_to(0, tag, sent.back()), kPatience)->done(), "it waits");
  }
  engines[1]->close();
  std::vector<std::shared_ptr<engine::Operation>> recvs;
  for (std::uint32_t tag = 0; tag < kMessages; ++tag) {
    recvs.push_back(engines[0]->start(recv_from(1, tag, got[tag]), kPatience));
  }
  while (engines[0]->watch()) {
  }
  for (const auto& recv : recvs) {
    CHECK(recv->done() && recv->status().ok(), "%s", recv->status().message().c_str());
  }
  CHECK(got == sent, "what arrived differs");
  engines[0]->close();
}

RUN_TESTS()
