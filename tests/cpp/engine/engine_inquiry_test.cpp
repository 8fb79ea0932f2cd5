// Engines on a virtual network and a virtual clock: whom they name when a deadline has passed, and
// what a rank is told that comes when the others have given up.
#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;

namespace {

// Starts the operation of `rank`; the last is the one that stands still.
using Start = std::function<std::shared_ptr<Operation>(int rank)>;

// Stops `victim` in the middle of an operation of all ranks, and lets it go on when the others have
// failed.
void stop_midway(Ranks& ranks, int size, int victim, std::uint64_t rounds, const Start& start) {
  std::vector<std::shared_ptr<Operation>> operations;
  for (int rank = 0; rank < size; ++rank) operations.push_back(start(rank));
  ranks.run_rounds(rounds);
  const auto over = [](const auto& operation) { return operation->done(); };
  if (std::any_of(operations.begin(), operations.end(), over)) return;
  ranks.stop(victim);
  ranks.run_until(4 * kSecond);
  std::string text;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim) continue;
    const auto& operation = *operations[static_cast<std::size_t>(rank)];
    CHECK(operation.done(), "rank %d of %d hangs after %llu rounds", rank, size,
          static_cast<unsigned long long>(rounds));
    if (operation.status().ok()) continue;  // it has done its part
    const std::string& message = operation.status().message();
    CHECK(operation.status().ranks() == std::vector<int>{victim},
          "%d of %d stopped after %llu rounds, rank %d: %s", victim, size,
          static_cast<unsigned long long>(rounds), rank, message.c_str());
    CHECK(text.empty() || text == message, "%s / %s", text.c_str(), message.c_str());
    text = message;
  }
  ranks.go_on();
  ranks.run_until(5 * kSecond);
  const Operation& late = *operations[static_cast<std::size_t>(victim)];
  CHECK(late.done(), "the rank that was stopped hangs");
  CHECK(text.empty() || late.status().message() == text || late.status().ok(), "%s / %s",
        text.c_str(), late.status().message().c_str());
}

}  // namespace

TEST(whoever_is_stopped_in_a_ring_is_named_alone) {
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    Prng random(seed);
    const int size = 2 + static_cast<int>(random.below(5));
    const int victim = static_cast<int>(random.below(static_cast<std::uint64_t>(size)));
    Ranks ranks(size);
    Sums sums(ranks);
    stop_midway(ranks, size, victim, 1 + random.below(40), [&](int rank) {
      return sums.start(rank, 60'000, rank == 0 ? kSecond : kSecond + kMillisecond);
    });
  }
}

TEST(whoever_comes_late_is_told_what_the_others_were_told) {
  for (const Nanoseconds late_at : {1100 * kMillisecond, 1400 * kMillisecond, 3 * kSecond}) {
    Ranks ranks(3);
    Sums sums(ranks);
    const auto one = sums.start(0, 3, kSecond), two = sums.start(1, 3, kSecond);
    ranks.run_until(late_at);
    const auto late = sums.start(2, 3, 60 * kSecond);
    ranks.run_until(5 * kSecond);
    for (const auto& operation : {one, two, late}) {
      expect(*operation, Code::kTimeout,
             "operation 1 (all_reduce of 3 uint64, op sum) did not finish within 1 s: rank 2 did "
             "not arrive",
             {2});
    }
  }
}

TEST(a_rank_that_judges_and_falls_silent_is_replaced) {
  Ranks ranks(3);
  Sums sums(ranks);
  const auto one = sums.start(0, 3, kSecond), two = sums.start(1, 3, 60 * kSecond);
  ranks.run_until(1050 * kMillisecond);
  ranks.stop(0);
  ranks.run_until(3 * kSecond);
  CHECK(two->done() && two->status().code() == Code::kTimeout, "%s",
        two->status().message().c_str());
  ranks.go_on();
  ranks.run_until(4 * kSecond);
  CHECK(one->done() && one->status().message() == two->status().message(), "%s",
        one->status().message().c_str());
}

TEST(what_all_but_one_have_ended_well_ends_well) {
  Ranks ranks(2);
  Sums sums(ranks);
  const auto first = sums.start(0, 3, kSecond), part = sums.start(1, 3, kSecond);
  ranks.run_rounds(1);
  ranks.stop(1);
  ranks.run_until(500 * kMillisecond);
  if (first->done()) {
    const auto second = sums.start(0, 3, kSecond);
    ranks.run_until(3 * kSecond);
    CHECK(second->done() && !second->status().ok(), "rank 1 is stopped");
    ranks.go_on();
    ranks.run_until(4 * kSecond);
    CHECK(part->done() && part->status().ok(), "%s", part->status().message().c_str());
    const auto late = sums.start(1, 3, kSecond);
    ranks.run_until(5 * kSecond);
    CHECK(late->done() && late->status().code() == Code::kTimeout, "%s",
          late->status().message().c_str());
  }
}

RUN_TESTS()
