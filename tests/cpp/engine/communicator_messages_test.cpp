// Messages whose receives come after their first segments, over shared memory and TCP streams: what
// has arrived and what follows reach the memory of the receive, and nothing else does.
#include <algorithm>
#include <chrono>

#include "engine/communicator.h"
#include "tests/cpp/engine/communicator_world.h"

using namespace pycoll;
using namespace pycoll::testing;
using engine::Communicator;

namespace {

constexpr std::uint32_t kHead = 1, kPayload = 2;
// Elements of 8 bytes: none, one, around one segment, around what a channel holds, and many.
constexpr std::size_t kCounts[] = {0, 1, 8'191, 8'192, 8'193, 32'768, 32'769, 400'001};

// A header that says how long its payload is, and the payload, as stores send them.
void send_all(Communicator& rank, int peer, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const std::size_t count = kCounts[static_cast<std::size_t>(round) % std::size(kCounts)];
    std::vector<Element> head = {count}, payload = input_of(rank.rank(), round, count);
    expect_ok(rank.run(send_to(peer, kHead, head), kPatience, nullptr), "send of a header");
    const auto sent = rank.start(send_to(peer, kPayload, payload), kPatience);
    expect_ok(rank.drive(*sent, kForever, nullptr), "send of a payload");
  }
}

void recv_all(Communicator& rank, int peer, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const auto found = std::make_shared<executor::Probed>();
    Status status;
    while (!rank.probe({peer, kHead, found}, kSecond, nullptr, &status)) expect_ok(status, "probe");
    std::vector<Element> head(1);
    expect_ok(rank.run(recv_from(peer, kHead, head), kPatience, nullptr), "recv of a header");
    if (round % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::vector<Element> payload(head[0]);
    expect_ok(rank.run(recv_from(peer, kPayload, payload), kPatience, nullptr),
              "recv of a payload");
    CHECK(payload == input_of(peer, round, head[0]), "rank %d, round %d, %zu elements", rank.rank(),
          round, payload.size());
  }
}

// The bytes of the next message of `tag`, which `memory` receives if it has space for it.
std::size_t recv_within(Communicator& rank, int peer, std::uint32_t tag,
                        std::vector<Element>& memory) {
  const auto found = std::make_shared<executor::Probed>();
  Status status;
  const executor::Memory target = recv_from(peer, tag, memory).data;
  const bool is_there =
      rank.recv_within({peer, tag, found}, target, kPatience, kPatience, nullptr, &status);
  expect_ok(status, "recv_within");
  CHECK(is_there && found->source == peer && found->tag == tag, "another message");
  return found->bytes;
}

// A payload that arrives while its receive is open. Rank 0 knows it by a header.
struct Arrival {
  explicit Arrival(CommunicatorWorld& world) : payload(input_of(1, 9, kMany)), got(kMany, kOld) {
    std::vector<Element> head = {kMany};
    expect_ok(world.at(1).run(send_to(0, kHead, head), kPatience, nullptr), "send of a header");
    sent = world.at(1).start(send_to(0, kPayload, payload), kPatience);
    expect_ok(world.at(0).run(recv_from(1, kHead, head), kPatience, nullptr), "recv of a header");
    received = world.at(0).start(recv_from(1, kPayload, got), kPatience);
  }

  // A receive has failed, so its memory belongs to its caller again.
  void expect_nothing_more() const {
    const std::vector<Element> before = got;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(got == before, "memory was written after the receive had ended");
    for (std::size_t i = 0; i < kMany; ++i) {
      CHECK(got[i] == kOld || got[i] == payload[i], "element %zu was never sent", i);
    }
  }

  static constexpr std::size_t kMany = 1 << 20;
  static constexpr Element kOld = 0x5555555555555555;
  std::vector<Element> payload, got;
  std::shared_ptr<engine::Operation> sent, received;
};

}  // namespace

TEST(payloads_that_follow_their_headers_are_exact_in_both_directions) {
  constexpr int kRounds = 24;
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    on_threads({0, 1, 2, 3}, [&](int thread) {
      const int rank = thread % 2;
      thread < 2 ? send_all(world.at(rank), 1 - rank, kRounds)
                 : recv_all(world.at(rank), 1 - rank, kRounds);
    });
  }
}

// Each thread of rank 0 waits for messages of one peer only, while those of others arrive too.
TEST(payloads_of_several_peers_reach_their_own_receives) {
  constexpr int kRounds = 10;
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(4, fabric);
    on_threads({1, 2, 3, 4, 5, 6}, [&](int thread) {
      thread < 4 ? send_all(world.at(thread), 0, kRounds)
                 : recv_all(world.at(0), thread - 3, kRounds);
    });
  }
}

TEST(a_receive_of_another_length_leaves_its_memory_and_the_next_message_alone) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    on_threads({0, 1}, [&](int rank) {
      if (rank == 1) return send_all(world.at(1), 0, 8);
      for (int round = 0; round < 8; ++round) {
        std::vector<Element> head(1);
        expect_ok(world.at(0).run(recv_from(1, kHead, head), kPatience, nullptr), "recv");
        const std::vector<Element> old = input_of(2, round, head[0] + 1);
        std::vector<Element> wrong = old;
        const Status status = world.at(0).run(recv_from(1, kPayload, wrong), kPatience, nullptr);
        expect(status, Code::kMismatch, {1}, "recv of a payload");
        CHECK(wrong == old, "round %d: the memory was written", round);
      }
    });
  }
}

TEST(a_message_of_unknown_length_is_received_where_it_fits) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    on_threads({0, 1}, [&](int rank) {
      if (rank == 1) return send_all(world.at(1), 0, 16);
      for (int round = 0; round < 16; ++round) {
        std::vector<Element> head(3, 7);
        CHECK(recv_within(world.at(0), 1, kHead, head) == 8, "a header has 8 bytes");
        CHECK(head[1] == 7 && head[2] == 7, "the memory behind the message was written");
        const std::size_t count = head[0];
        if (count != 0) {
          std::vector<Element> short_one(count - 1, 7);
          CHECK(recv_within(world.at(0), 1, kPayload, short_one) == count * 8, "round %d", round);
          CHECK(short_one == std::vector<Element>(count - 1, 7), "it was written to");
        }
        std::vector<Element> payload(count + 1, 7), expected = input_of(1, round, count);
        CHECK(recv_within(world.at(0), 1, kPayload, payload) == count * 8, "round %d", round);
        expected.push_back(7);
        CHECK(payload == expected, "round %d, %zu elements", round, count);
      }
    });
  }
}

// Each message goes to one thread. Of the threads that wait, one drives the communicator.
TEST(threads_share_messages_of_unknown_length) {
  constexpr std::size_t kThreads = 3, kEach = 40;
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    std::vector<std::vector<Element>> got(kThreads);
    std::vector<std::thread> threads;
    for (std::vector<Element>& mine : got) {
      threads.emplace_back([&world, &mine] {
        for (std::size_t i = 0; i < kEach; ++i) {
          std::vector<Element> memory(2000);
          const std::size_t count = recv_within(world.at(0), 1, kHead, memory) / 8;
          const int number = static_cast<int>(count) - 1;
          memory.resize(count);
          CHECK(memory == input_of(1, number, count), "message %d differs", number);
          mine.push_back(count);
        }
      });
    }
    std::vector<Element> expected;
    for (int number = 0; number < static_cast<int>(kThreads * kEach); ++number) {
      const std::size_t count = static_cast<std::size_t>(number) + 1;
      std::vector<Element> data = input_of(1, number, count);
      expect_ok(world.at(1).run(send_to(0, kHead, data), kPatience, nullptr), "send");
      expected.push_back(count);
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<Element> all;
    for (const std::vector<Element>& mine : got) all.insert(all.end(), mine.begin(), mine.end());
    std::sort(all.begin(), all.end());
    CHECK(all == expected, "a message was lost or came twice");
  }
}

TEST(waiting_for_a_message_of_unknown_length_ends) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(2, fabric);
    const auto found = std::make_shared<executor::Probed>();
    Status status;
    const auto wait = [&](Nanoseconds patience) {
      return world.at(0).recv_within({1, kHead, found}, {}, patience, kPatience, nullptr, &status);
    };
    CHECK(!wait(0) && !wait(2'000'000), "no message was sent");
    expect_ok(status, "the end of the patience");
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      world.kill(1);
    });
    CHECK(!wait(kPatience), "no message was sent");
    killer.join();
    expect(status, Code::kPeerLost, {1}, "recv_within");
    world.at(0).close();
    CHECK(!wait(kPatience) && !status.ok(), "it is closed");
  }
}

TEST(nothing_is_written_after_a_close_midway) {
  for (const Fabric fabric : kFabrics) {
    for (int round = 0; round < 4; ++round) {
      CommunicatorWorld world(2, fabric);
      Arrival arrival(world);
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      world.at(0).close();
      CHECK(arrival.received->done(), "the receive is open after close()");
      arrival.expect_nothing_more();
      (void)world.at(1).drive(*arrival.sent, kForever, nullptr);
    }
  }
}

TEST(nothing_is_written_after_the_sender_has_died_midway) {
  for (const Fabric fabric : kFabrics) {
    for (int round = 0; round < 4; ++round) {
      CommunicatorWorld world(2, fabric);
      Arrival arrival(world);
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      world.kill(1);
      const Status status = world.at(0).drive(*arrival.received, kForever, nullptr);
      // Rank 1 has a thread that goes on, and may tell first that it has lost rank 0.
      CHECK(status.ok() || status.code() == Code::kPeerLost, "%s", status.message().c_str());
      arrival.expect_nothing_more();
      (void)world.at(1).drive(*arrival.sent, kForever, nullptr);
    }
  }
}

RUN_TESTS()
