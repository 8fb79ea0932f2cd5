// Engines on a virtual network and a virtual clock: clocks of queued operations, what ranks say of
// each other, and peers that write nonsense.
#include "engine/engine.h"

#include <cstring>

#include "base/bytes.h"
#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;
using transport::Notice;

TEST(the_clock_of_a_queued_operation_starts_at_its_turn) {
  Ranks ranks(2);
  Sums sums(ranks);
  const auto first = sums.start(0, 10, kSecond), second = sums.start(0, 20, kSecond);
  ranks.run_until(800 * kMillisecond);
  (void)sums.start(1, 10, kSecond);
  ranks.run_until(1600 * kMillisecond);
  CHECK(first->done() && !second->done(), "the second waits for its peer");
  (void)sums.start(1, 20, kSecond);
  ranks.run_until(1700 * kMillisecond);
  CHECK(first->status().ok() && second->done() && second->status().ok(), "%s",
        second->status().message().c_str());
  const auto third = sums.start(0, 5, kSecond);
  ranks.run_until(2690 * kMillisecond);
  CHECK(!third->done(), "ended before its time");
  ranks.run_until(2970 * kMillisecond);  // the others have 250 ms to answer
  expect(*third, Code::kTimeout,
         "operation 3 (all_reduce of 5 uint64, op sum) did not finish within 1 s: rank 1 did not "
         "arrive",
         {1});
}

TEST(no_deadline_is_no_deadline) {
  Ranks ranks(2);
  Sums sums(ranks);
  std::vector<Element> slot_buffer(1);
  ranks.run_until(kSecond);
  const auto sum = sums.start(0, 10, kForever);
  const auto recv = ranks.at(0).start(recv_from(1, 0, slot_buffer), kForever);
  ranks.run_until(30 * kSecond);
  CHECK(!sum->done() && !recv->done(), "ended without a deadline: %s",
        sum->status().message().c_str());
}

// A timeout is told in the words of the rank whose deadline it was, also to those who do something
// else or come later. Rank 2 is elsewhere, but waits for rank 3.
TEST(everybody_tells_of_one_timeout_alike) {
  Ranks ranks(4);
  Sums sums(ranks);
  std::vector<Element> slot_buffer(1);
  const auto sum = sums.start(0, 10, kSecond);
  const auto other = sums.start(1, 10, 60 * kSecond);
  const auto recv = ranks.at(2).start(recv_from(3, 0, slot_buffer), 60 * kSecond);
  ranks.run_until(2 * kSecond);
  const auto late = sums.start(3, 10, 60 * kSecond);
  ranks.run_until(3 * kSecond);
  for (const auto& operation : {sum, other, recv, late}) {
    expect(*operation, Code::kTimeout,
           "operation 1 (all_reduce of 10 uint64, op sum) did not finish within 1 s: rank 3 did "
           "not arrive",
           {3});
  }
}

TEST(a_message_that_does_not_come_is_told_alike) {
  Ranks ranks(3);
  Sums sums(ranks);
  std::vector<Element> slot_buffer(1);
  const auto recv = ranks.at(0).start(recv_from(2, 5, slot_buffer), kSecond);
  const auto sum = sums.start(1, 10, 60 * kSecond);
  ranks.run_until(2 * kSecond);
  for (const auto& operation : {recv, sum}) {
    expect(
        *operation, Code::kTimeout,
        "rank 0's recv from rank 2 with tag 5 did not finish within 1 s: rank 2 sent nothing with "
        "this tag",
        {2});
  }
}

// A rank from which something of the operation has come did arrive, though it never said so. It
// does not answer: nobody knows whether it waits for rank 2 in its turn.
TEST(a_rank_that_sent_something_is_not_missing) {
  Ranks ranks(3);
  const auto bytes = ring_plan(3, 1)->plan().channels.size();
  CHECK(bytes == 2, "a ring has one neighbour each way");
  Sums sums(ranks);
  const auto first = sums.start(1, 3000, kSecond);
  // Rank 0 plays its first segment by hand and falls silent.
  const auto request = all_reduce(ring_plan(3, 0), *sums.data[0], *sums.data[0]);
  const transport::SegmentHeader header{
      engine::next_call(0), hash_bytes(&request.descriptor, sizeof(request.descriptor)), 8000, 0};
  auto& channel = ranks.link(0, 1).send_channel(0);
  CHECK(channel.hand_over(header, request.input.data), "no free slot");
  ranks.run_until(2 * kSecond);
  expect(*first, Code::kTimeout,
         "operation 1 (all_reduce of 3000 uint64, op sum) did not finish within 1 s: rank 0 sent "
         "nothing more; nothing is known of rank 2",
         {0});
}

TEST(arrays_of_other_lengths_are_told_alike) {
  Ranks ranks(3);
  Sums sums(ranks);
  std::vector<std::shared_ptr<Operation>> operations;
  for (int rank = 0; rank < 3; ++rank) {
    operations.push_back(sums.start(rank, rank == 2 ? 11 : 12, 60 * kSecond,
                                    [](executor::CollectiveRequest& request) {
                                      request.descriptor.count = 12;  // as where counts may differ
                                    }));
  }
  ranks.run_until(3 * kSecond);
  for (const auto& operation : operations) {
    expect(*operation, Code::kMismatch,
           "ranks disagree about the lengths of their arrays in operation 1 (all_reduce of 12 "
           "uint64, op sum): compare their counts and splits",
           {});
  }
}

// While ranks dispute, a new operation does not change what this one has told of itself.
TEST(a_dispute_is_judged_by_what_was_told) {
  Ranks ranks(4);  // the last one is elsewhere, so the others wait for its word
  Sums sums(ranks);
  std::vector<Element> slot_buffer(1);
  const auto recv = ranks.at(0).start(recv_from(1, 0, slot_buffer), 60 * kSecond);
  const auto first = sums.start(1, 10, 60 * kSecond), second = sums.start(2, 20, 60 * kSecond);
  ranks.run_until(20 * kMillisecond);
  CHECK(!recv->done(), "rank 0 waits for the word of rank 3");
  const auto late = sums.start(0, 20, 60 * kSecond);
  ranks.run_until(3 * kSecond);
  for (const auto& operation : {recv, first, second, late}) {
    expect(
        *operation, Code::kMismatch,
        "ranks disagree about operation 1: rank 1 called all_reduce of 10 uint64, op sum; rank 2 "
        "called all_reduce of 20 uint64, op sum",
        {2});
  }
}

TEST(a_refused_request_leaves_no_trace) {
  Ranks ranks(2);
  Sums sums(ranks);
  (void)sums.start(0, 10, kSecond);
  (void)sums.start(1, 10, kSecond);
  ranks.run_until(10 * kMillisecond);
  const auto refused =
      sums.start(0, 77, kSecond, [](executor::CollectiveRequest& request) { request.counts = {}; });
  expect(*refused, Code::kInvalidArgument, "counts has 0 entries, the plan has 1 blocks", {0});
  std::vector<Element> slot_buffer(1);
  (void)ranks.at(0).start(recv_from(1, 0, slot_buffer), kSecond);
  ranks.run_until(2 * kSecond);
  const Notice notice = ranks.link(1, 0).newest();
  CHECK(notice.failure == static_cast<std::uint32_t>(Code::kTimeout), "failure %u", notice.failure);
  CHECK(engine::call_of(notice.sequence) == 1 && notice.descriptor.count == 10, "it tells of %s",
        to_text(notice.descriptor).c_str());
}

// Refused behind another operation, at its turn; what is queued behind it goes on.
TEST(a_wrong_request_in_a_queue_ends_alone) {
  Ranks ranks(2);
  Sums sums(ranks);
  std::vector<std::shared_ptr<Operation>> good;
  std::vector<std::shared_ptr<Operation>> wrong;
  for (int rank = 0; rank < 2; ++rank) {
    good.push_back(sums.start(rank, 10, kSecond));
    wrong.push_back(sums.start(rank, 10, kSecond, [&](executor::CollectiveRequest& request) {
      if (rank == 0) request.counts = {9};
    }));
    good.push_back(sums.start(rank, 20, kSecond));
  }
  ranks.run_until(100 * kMillisecond);
  for (const auto& operation : good) {
    CHECK(operation->done() && operation->status().ok(), "%s",
          operation->status().message().c_str());
  }
  const std::string why = "input has 80 bytes, 72 were expected";
  expect(*wrong[0], Code::kInvalidArgument, why, {0});
  expect(*wrong[1], Code::kInvalidArgument,
         "rank 0 has refused its arguments of operation 2: " + why, {0});
}

TEST(a_malformed_message_ends_the_communicator) {
  Ranks ranks(3);
  std::vector<Element> slot_buffer(2), never(1);
  const auto recv = ranks.at(0).start(recv_from(1, 3, slot_buffer), kSecond);
  const auto other = ranks.at(2).start(recv_from(0, 0, never), kSecond);
  auto& channel = ranks.link(1, 0).send_channel(transport::kMessageChannel);
  std::memset(channel.reserve(64), 1, 64);
  channel.commit({1, 16, 64, 3});  // 64 bytes of a message of 16
  ranks.run_until(100 * kMillisecond);
  for (const auto& operation : {recv, other}) {
    const std::string during =
        std::string("recv from rank ") + (operation == recv ? "1 with tag 3" : "0 with tag 0");
    CHECK(operation->status().how() == "it sent a malformed message", "how");
    expect(*operation, Code::kPeerLost,
           "rank 1 was lost during " + during + ": it sent a malformed message", {1});
  }
}

TEST(a_notice_may_blame_only_ranks_that_exist) {
  for (const int culprit : {-1, -7, 3, 1 << 30}) {
    Ranks ranks(3);
    std::vector<Element> slot_buffer(1);
    const auto recv = ranks.at(0).start(recv_from(2, 0, slot_buffer), kSecond);
    Notice notice;
    notice.failure = static_cast<std::uint32_t>(Code::kPeerLost);
    notice.culprit = culprit;
    std::strcpy(notice.detail, "who knows");
    ranks.link(1, 0).post(notice);
    ranks.run_until(100 * kMillisecond);
    expect(*recv, Code::kPeerLost, "rank 1 was lost during recv from rank 2 with tag 0: who knows",
           {1});
  }
}

TEST(notices_of_any_content_end_in_some_status) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Prng random(seed);
    Ranks ranks(3);
    Sums sums(ranks);
    const auto sum = sums.start(0, 10, kSecond);
    Notice notice;
    notice.sequence = random.below(3) << engine::kPartBits;
    notice.failure = static_cast<std::uint32_t>(random.below(12));
    notice.culprit = static_cast<std::int32_t>(random.below(8)) - 3;
    notice.inquiry = static_cast<std::uint32_t>(random.below(5));
    notice.wait_count = static_cast<std::uint32_t>(random.below(40));
    for (std::uint32_t& one : notice.waits) one = static_cast<std::uint32_t>(random.below(9));
    for (transport::Numbers& one : notice.refusals.ranges) {
      one = {random.below(3) << engine::kPartBits, random.below(3) << engine::kPartBits};
    }
    for (char& letter : notice.refusals.why) letter = static_cast<char>(random.next());
    notice.dispute.operation = random.below(3) << engine::kPartBits;
    notice.dispute.arrays = static_cast<std::uint32_t>(random.next());
    notice.dispute.round = static_cast<std::uint32_t>(random.below(2) * random.next());
    notice.dispute.begin = static_cast<std::uint32_t>(random.next());
    notice.dispute.width = static_cast<std::uint32_t>(random.below(2) * random.next());
    for (std::uint32_t& digest : notice.dispute.digests) {
      digest = static_cast<std::uint32_t>(random.next());
    }
    for (char& letter : notice.detail) letter = static_cast<char>(random.next());
    notice.descriptor.collective = static_cast<Collective>(random.below(256));
    notice.descriptor.dtype = static_cast<DType>(random.below(256));
    notice.descriptor.op = static_cast<ReduceOp>(random.below(256));
    ranks.link(1, 0).post(notice);
    ranks.run_until(3 * kSecond);
    CHECK(sum->done() && !sum->status().ok(), "seed %llu", static_cast<unsigned long long>(seed));
    for (const int rank : sum->status().ranks()) {
      CHECK(rank >= 0 && rank < 3, "seed %llu names rank %d", static_cast<unsigned long long>(seed),
            rank);
    }
  }
}

// A rank that has left in good order is missed only by those who need it.
TEST(a_rank_that_left_is_not_missed_by_others) {
  Ranks ranks(3);
  std::vector<Element> sent = input_of(0, 0, 30'000), got(30'000), slot_buffer(1);
  ranks.at(2).close();
  const auto recv = ranks.at(1).start(recv_from(0, 0, got), kSecond);
  ranks.run_until(500 * kMillisecond);
  const auto send = ranks.at(0).start(send_to(1, 0, sent), kSecond);
  ranks.run_until(900 * kMillisecond);
  CHECK(send->done() && send->status().ok() && recv->done() && recv->status().ok(), "%s",
        recv->status().message().c_str());
  CHECK(got == sent, "what arrived differs");
  const auto missed = ranks.at(1).start(recv_from(2, 0, slot_buffer), kSecond);
  ranks.run_until(kSecond);
  expect(
      *missed, Code::kPeerLost,
      "rank 2 was lost during recv from rank 2 with tag 0: it closed its communicator before the "
      "operation was done",
      {2});
}

// The root of a chain has done its part and leaves; what it sent waits behind a slow neighbour.
TEST(a_rank_that_did_its_part_may_leave_while_others_still_pass_it_on) {
  Ranks ranks(3);
  constexpr std::size_t kCount = 6 * 8192;  // six tiles: more than one channel holds
  std::vector<std::vector<Element>> data(3, std::vector<Element>(kCount));
  data[0] = input_of(0, 0, kCount);
  std::vector<std::shared_ptr<Operation>> operations;
  const auto enter = [&](int rank) {
    auto& mine = data[static_cast<std::size_t>(rank)];
    auto request = all_reduce(chain_plan(rank), mine, mine);
    request.descriptor.collective = Collective::kBroadcast;
    if (rank != 0) request.input = {};
    operations.push_back(ranks.at(rank).start(std::move(request), 60 * kSecond));
  };
  enter(0);
  enter(1);
  ranks.run_until(kSecond);
  CHECK(operations[0]->done() && operations[0]->status().ok(), "the root has sent everything");
  CHECK(!operations[1]->done(), "rank 1 waits for rank 2");
  ranks.at(0).close();
  ranks.run_until(3 * kSecond);
  enter(2);
  ranks.run_until(4 * kSecond);
  for (const auto& operation : operations) {
    CHECK(operation->done() && operation->status().ok(), "%s",
          operation->status().message().c_str());
  }
  CHECK(data[1] == data[0] && data[2] == data[0], "what arrived differs");
}

TEST(closing_ends_a_queue_and_nothing_moves_afterwards) {
  Ranks ranks(2);
  Sums sums(ranks);
  std::vector<std::shared_ptr<Operation>> queue;
  for (int i = 0; i < 4; ++i) queue.push_back(sums.start(0, 10, kSecond));
  ranks.at(0).close();
  for (const auto& operation : queue) {
    expect(*operation, Code::kClosed, "the communicator was closed", {});
  }
  CHECK(!ranks.at(0).operations().active() && !ranks.at(0).step() && !ranks.at(0).watch() &&
            !ranks.at(0).operations().peers.poll(true),
        "a closed engine moves");
  expect(*sums.start(0, 10, kSecond), Code::kClosed, "the communicator was closed", {});
}

// Messages to oneself, received before they are sent: each is forgotten when it has ended.
TEST(messages_to_oneself_leave_nothing_behind) {
  Ranks ranks(2);
  std::vector<Element> data = input_of(0, 0, 3), slot_buffer(3);
  for (int round = 0; round < 100; ++round) {
    const auto recv = ranks.at(0).start(recv_from(0, 1, slot_buffer), kSecond);
    const auto send = ranks.at(0).start(send_to(0, 1, data), kSecond);
    CHECK(send->done() && recv->done() && recv->status().ok(), "round %d", round);
    CHECK(!ranks.at(0).operations().active(), "round %d: something is open", round);
  }
  CHECK(slot_buffer == data, "what arrived differs");
  const auto alone = ranks.at(0).start(recv_from(0, 2, slot_buffer), kSecond);
  ranks.run_until(2 * kSecond);
  expect(*alone, Code::kTimeout,
         "rank 0's recv from rank 0 with tag 2 did not finish within 1 s: rank 0 sent nothing with "
         "this tag",
         {0});
}

// One step is a bounded piece of work, so that a driver can look up.
TEST(a_step_is_bounded) {
  Ranks ranks(1);
  PlanBuilder builder(Collective::kAllReduce, 1, 0);
  plan::Row& row = builder.row(0, {}, {});
  take(row, plan::Buffer::kInput, 0);
  put(row, plan::Buffer::kOutput, 0);
  std::vector<Element> data = input_of(0, 0, 1000), result(1000);
  auto request = all_reduce(load(builder), data, result);
  request.segment_bytes = 8;
  const auto sum = ranks.at(0).start(std::move(request), kSecond);
  int steps = 0;
  while (!sum->done()) {
    CHECK(ranks.at(0).step(), "step %d moved nothing", steps);
    ++steps;
  }
  CHECK(steps == 16, "1000 rows in %d steps of 64", steps);
  CHECK(result == data, "the result differs");
}

RUN_TESTS()
