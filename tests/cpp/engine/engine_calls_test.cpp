// Engines on a virtual network and a virtual clock: calls that are under way at the same time.
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/operations/call.h"
#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;
using engine::Call;

namespace {

// A call in place; `data` must outlive it.
std::shared_ptr<Operation> start(Engine& engine, executor::CollectiveRequest request,
                                 std::vector<Element>& data, Nanoseconds timeout) {
  auto operation = std::make_shared<Operation>();
  auto* memory = reinterpret_cast<std::byte*>(data.data());
  engine.start(std::make_shared<Call>(std::move(request)), memory, memory, operation, timeout);
  return operation;
}

}  // namespace

// A later call is sent before an earlier one has received, unless it reads what that one writes.
TEST(calls_run_along_if_their_memory_allows_it) {
  for (const bool same : {false, true}) {
    Ranks ranks(2);
    std::vector<Element> one = input_of(0, 0, 10), two = input_of(0, 1, 10);
    const auto call = std::make_shared<engine::Call>(all_reduce(direct_plan(2, 0), one, one));
    std::vector<std::shared_ptr<Operation>> operations;
    for (std::vector<Element>* data : {&one, same ? &one : &two}) {
      operations.push_back(std::make_shared<Operation>());
      auto* memory = reinterpret_cast<std::byte*>(data->data());
      ranks.at(0).start(call, memory, memory, operations.back(), kSecond);
    }
    ranks.run_until(100 * kMillisecond);
    (void)ranks.at(1).operations().peers.poll(true);
    auto& channel = ranks.link(1, 0).recv_channel(0);
    const transport::Segment* first = channel.peek();
    CHECK(first != nullptr && engine::call_of(first->header.sequence) == 1, "nothing was sent");
    channel.release();
    const transport::Segment* second = channel.peek();
    CHECK((second == nullptr) == same, "same memory: %d", same ? 1 : 0);
    CHECK(same || engine::call_of(second->header.sequence) == 2, "sent out of order");
    ranks.run_until(3 * kSecond);
    for (const auto& operation : operations) {
      expect(*operation, Code::kTimeout,
             "operation 1 (all_reduce of 10 uint64, op sum) did not finish within 1 s: rank 1 did "
             "not arrive",
             {1});
    }
  }
}

namespace {

// All_reduces of several tiles through a server, the last rank; each has memory of its own.
class ServedSums {
 public:
  ServedSums(Ranks& ranks, int size) : ranks_(ranks), size_(size) {}

  // Starts operation `round` on a rank.
  void start(int rank, int round) {
    const bool serves = rank == size_ - 1;
    std::vector<Element>& data = data_.emplace_back(input_of(rank, round, serves ? 0 : kCount));
    auto request = all_reduce(served_plan(size_, rank), data, data);
    request.counts = {kCount};
    request.descriptor.count = kCount;
    request.segment_bytes = kTile * sizeof(Element);
    operations_.push_back(ranks_.at(rank).start(std::move(request), kSecond));
    rounds_.push_back(round);
  }
  void check() const {
    for (std::size_t i = 0; i < data_.size(); ++i) {
      const Status status = operations_[i]->status();
      CHECK(operations_[i]->done() && status.ok(), "%s", status.message().c_str());
      CHECK(data_[i].empty() || data_[i] == sum_of(size_ - 1, rounds_[i], kCount), "round %d",
            rounds_[i]);
    }
  }
  void check_refused(const char* why) const {
    for (const auto& operation : operations_) {
      const Status status = operation->status();
      CHECK(status.code() == Code::kInvalidArgument &&
                status.message().find(why) != std::string::npos,
            "%s", status.message().c_str());
    }
  }
  static constexpr std::size_t kTile = 10, kCount = 2 * kTile - 3;

 private:
  Ranks& ranks_;
  const int size_;
  std::deque<std::vector<Element>> data_;
  std::vector<std::shared_ptr<Operation>> operations_;
  std::vector<int> rounds_;
};

}  // namespace

// The link out of a worker is free when it has sent its last tile, though no sum has come.
TEST(a_long_operation_with_servers_sends_while_the_one_before_it_receives) {
  Ranks ranks(3);
  ServedSums sums(ranks, 3);
  for (const int round : {0, 1}) sums.start(0, round);
  ranks.run_until(kMillisecond);
  transport::RecvChannel& channel = ranks.link(2, 0).recv_channel(0);
  for (const std::uint64_t call : {1, 1, 2, 2}) {
    (void)ranks.at(2).operations().peers.poll(true);
    const transport::Segment* segment = channel.peek();
    CHECK(segment != nullptr && engine::call_of(segment->header.sequence) == call,
          "nothing of operation %llu", static_cast<unsigned long long>(call));
    channel.release();
  }
}

TEST(operations_with_servers_that_run_along_have_the_right_sums) {
  Prng prng(0x5e7e5);
  for (int turn = 0; turn < 20; ++turn) {
    const int size = 2 + static_cast<int>(prng.below(3));
    Ranks ranks(size);
    ServedSums sums(ranks, size);
    for (int rank = 0; rank < size; ++rank) {
      for (int round = 0; round < 7; ++round) sums.start(rank, round);
      if (prng.chance(1, 2)) ranks.run_until((rank + 1) * kMillisecond);
    }
    ranks.run_until(kSecond / 2);
    sums.check();
  }
}

// All ranks drop what one of them refuses, and go on with those that run along.
TEST(a_refused_operation_with_servers_leaves_the_others) {
  Ranks ranks(3);
  ServedSums sums(ranks, 3), refused(ranks, 3);
  for (int rank = 0; rank < 3; ++rank) {
    sums.start(rank, 0);
    rank == 1 ? ranks.at(1).refuse("too many legs") : refused.start(rank, 1);
    for (const int round : {2, 3}) sums.start(rank, round);
  }
  ranks.run_until(kSecond / 2);
  sums.check();
  refused.check_refused("too many legs");
}

// Who only starts calls sends what can be sent, and leaves the rest to those who wait.
TEST(what_was_started_runs_as_far_as_it_can) {
  Ranks ranks(2);
  std::vector<std::vector<Element>> data, sums;
  for (int rank = 0; rank < 2; ++rank) {
    for (int round = 0; round < 2; ++round) data.push_back(input_of(rank, round, 10));
  }
  for (const std::size_t round : {0, 1}) {
    sums.push_back(data[round]);
    for (std::size_t i = 0; i < 10; ++i) sums[round][i] += data[2 + round][i];
  }
  std::vector<std::shared_ptr<Operation>> operations;
  for (const int rank : {0, 1}) {
    for (const int round : {0, 1}) {
      auto& memory = data[static_cast<std::size_t>(2 * rank + round)];
      auto request = all_reduce(direct_plan(2, rank), memory, memory);
      operations.push_back(start(ranks.at(rank), std::move(request), memory, kSecond));
      const bool sent = ranks.at(rank).step(Engine::Part::kStarted);
      CHECK(sent || round != 0, "rank %d sent nothing", rank);
      CHECK(!ranks.at(rank).step(Engine::Part::kStarted), "rank %d moves with nothing to move",
            rank);
    }
  }
  ranks.run_until(kSecond / 2);
  for (const auto& operation : operations) CHECK(operation->done(), "one has not ended");
  for (const std::size_t round : {0, 1}) {
    CHECK(data[round] == sums[round] && data[2 + round] == sums[round], "call %zu", round);
  }
}

TEST(who_only_starts_calls_looks_at_what_has_come_when_no_more_may_run) {
  Ranks ranks(2);
  std::vector<std::vector<Element>> data;
  for (std::size_t i = 0; i < 2 * engine::Call::kRunsMax; ++i) {
    data.push_back(input_of(0, static_cast<int>(i), 10));
  }
  std::vector<std::shared_ptr<Operation>> operations;
  const auto start_one = [&](int rank, std::size_t number) {
    auto& memory = data[2 * number + static_cast<std::size_t>(rank)];
    auto request = all_reduce(direct_plan(2, rank), memory, memory);
    operations.push_back(start(ranks.at(rank), std::move(request), memory, kSecond));
    return ranks.at(rank).step(Engine::Part::kStarted);
  };
  for (std::size_t number = 0; number < engine::Call::kRunsMax; ++number) {
    (void)start_one(1, number);
  }
  for (std::size_t number = 0; number + 1 < engine::Call::kRunsMax; ++number) {
    CHECK(start_one(0, number) == (number == 0), "call %zu", number);
  }
  // What each has sent is with the other.
  for (const int rank : {1, 0}) (void)ranks.at(rank).operations().peers.poll(true);
  ranks.wait_until(kSecond / 10);
  for (const int rank : {1, 0}) (void)ranks.at(rank).operations().peers.poll(true);
  CHECK(!ranks.at(0).step(Engine::Part::kStarted), "looks though more may run");
  CHECK(start_one(0, engine::Call::kRunsMax - 1), "does not look though no more may run");
  ranks.run_until(kSecond / 2);
  for (const auto& operation : operations) CHECK(operation->done(), "one has not ended");
}

// Rank 0 is through with the first operation and finds the second odd; rank 2 is still in the
// first, and says what it has begun at the same time.
TEST(a_dispute_may_be_about_what_runs_along) {
  Ranks ranks(3);
  std::vector<Element> moved(4), ten(10), twenty(20);
  std::vector<std::shared_ptr<Operation>> operations;
  for (const int rank : {0, 2}) {
    auto along = all_reduce(chain_plan(rank), moved, moved);
    along.descriptor.collective = Collective::kBroadcast;
    if (rank != 0) along.input = {};
    operations.push_back(start(ranks.at(rank), std::move(along), moved, 60 * kSecond));
    auto& data = rank == 0 ? ten : twenty;
    operations.push_back(
        start(ranks.at(rank), all_reduce(ring_plan(3, rank), data, data), data, 60 * kSecond));
  }
  ranks.run_until(500 * kMillisecond);
  CHECK(operations[0]->done() && !operations[2]->done(), "rank 2 waits for rank 1");
  ranks.run_until(3 * kSecond);
  for (const std::size_t one : {1, 2, 3}) {
    expect(*operations[one], Code::kMismatch,
           "ranks disagree about operation 2: rank 0 called all_reduce of 10 uint64, op sum; rank "
           "2 called all_reduce of 20 uint64, op sum",
           {2});
  }
}

RUN_TESTS()
