// Collectives that ranks refuse: peers end them, in whatever state they are, and go on.
#include <cstring>

#include "base/prng.h"
#include "engine/operations/numbers.h"
#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;
using engine::NumberSet;
using transport::Numbers;

namespace {

std::string told(int rank, int operation, const std::string& why) {
  return "rank " + std::to_string(rank) + " has refused its arguments of operation " +
         std::to_string(operation) + ": " + why;
}

using Started = std::vector<std::vector<std::shared_ptr<Operation>>>;

// Whether the world lives on, and all its operations ended as their refusals say. A world ends
// where a rank was too far ahead, and all ranks hear of that.
bool ended_alike(Ranks& ranks, int size, std::uint64_t seed, const Started& started,
                 const std::vector<std::vector<bool>>& refused) {
  for (int rank = 0; rank < size; ++rank) {
    const Status& failure = ranks.at(rank).failure();
    CHECK(failure.ok() == ranks.at(0).failure().ok(), "seed %llu: %s",
          static_cast<unsigned long long>(seed), failure.message().c_str());
    if (!failure.ok()) {
      CHECK(failure.code() == Code::kInvalidArgument, "seed %llu: %s",
            static_cast<unsigned long long>(seed), failure.message().c_str());
      return false;
    }
    const auto& mine = started[static_cast<std::size_t>(rank)];
    for (std::size_t call = 0; call < mine.size(); ++call) {
      if (mine[call] == nullptr) continue;
      const bool any =
          std::find(refused[call].begin(), refused[call].end(), true) != refused[call].end();
      const Status& status = mine[call]->status();
      CHECK(mine[call]->done() && status.code() == (any ? Code::kInvalidArgument : Code::kOk),
            "seed %llu, rank %d, call %zu: %s", static_cast<unsigned long long>(seed), rank, call,
            status.message().c_str());
    }
  }
  return true;
}

}  // namespace

TEST(sets_of_numbers_hold_what_was_added) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Prng random(seed);
    NumberSet set;
    std::vector<bool> expected(200, false);
    for (int turn = 0; turn < 30; ++turn) {
      const std::uint64_t first = 1 + random.below(180), last = first + random.below(8);
      set.add({first, last});
      for (std::uint64_t one = first; one <= last; ++one) expected[one] = true;
      for (std::uint64_t one = 0; one < expected.size(); ++one) {
        CHECK(set.contains(one) == expected[one], "seed %llu, %llu",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(one));
      }
    }
  }
}

TEST(peers_end_what_one_rank_refuses_and_all_go_on) {
  for (int bad = 0; bad < 3; ++bad) {
    for (const std::size_t count : {std::size_t{10}, std::size_t{200'000}}) {
      Ranks ranks(3);
      Sums sums(ranks);
      std::vector<std::shared_ptr<Operation>> pending;
      for (int rank = 0; rank < 3; ++rank) {
        if (rank != bad) pending.push_back(sums.start(rank, count, 60 * kSecond));
      }
      ranks.run_until(100 * kMillisecond);
      ranks.at(bad).refuse("x is None");
      ranks.run_until(kSecond);
      for (const auto& one : pending) {
        expect(*one, Code::kInvalidArgument, told(bad, 1, "x is None"), {bad});
      }
      pending.clear();
      for (int rank = 0; rank < 3; ++rank) pending.push_back(sums.start(rank, count, kSecond));
      ranks.run_until(2 * kSecond);
      for (const auto& one : pending) {
        CHECK(one->done() && one->status().ok(), "%s", one->status().message().c_str());
      }
      CHECK(*sums.data[sums.data.size() - 1] == *sums.data[sums.data.size() - 2], "other sums");
    }
  }
}

TEST(who_comes_late_hears_of_it) {
  Ranks ranks(3);
  Sums sums(ranks);
  ranks.at(1).refuse("x is None");
  ranks.at(1).refuse("op is 7");
  ranks.run_until(kSecond);
  const auto first = sums.start(0, 10, kSecond), second = sums.start(0, 10, kSecond);
  ranks.run_until(1500 * kMillisecond);
  expect(*first, Code::kInvalidArgument,
         told(1, 1, "the last of several refusals, operation 2: op is 7"), {1});
  expect(*second, Code::kInvalidArgument, told(1, 2, "op is 7"), {1});
  (void)sums.start(1, 10, 60 * kSecond);
  (void)sums.start(0, 10, 60 * kSecond);
  ranks.run_until(10 * kSecond);
  const auto late = sums.start(2, 10, kSecond), later = sums.start(2, 10, kSecond);
  const auto third = sums.start(2, 10, kSecond);
  ranks.run_until(11 * kSecond);
  CHECK(late->done() && later->done() && third->done() && third->status().ok(), "%s",
        third->status().message().c_str());
  CHECK(late->status().ranks() == std::vector<int>{1}, "%s", late->status().message().c_str());
}

// A list is one call on all ranks, whatever was begun of it where.
TEST(parts_of_a_call_end_together) {
  Ranks ranks(2);
  Sums sums(ranks);
  ranks.at(0).operations().numbers.begin_call();
  std::vector<std::shared_ptr<Operation>> parts;
  for (int part = 0; part < 5; ++part) parts.push_back(sums.start(0, 1000, 60 * kSecond));
  ranks.at(0).operations().numbers.end_call();
  const auto behind = sums.start(0, 10, 60 * kSecond);
  ranks.at(1).refuse("array 3 is None");
  ranks.run_until(kSecond);
  for (const auto& part : parts) {
    expect(*part, Code::kInvalidArgument, told(1, 1, "array 3 is None"), {1});
  }
  const auto partner = sums.start(1, 10, kSecond);
  ranks.run_until(2 * kSecond);
  CHECK(behind->done() && behind->status().ok() && partner->status().ok(), "%s",
        behind->status().message().c_str());
}

TEST(random_refusals_leave_ranks_in_step) {
  int ended = 0;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    Prng random(seed);
    const int size = 2 + static_cast<int>(random.below(3));
    Ranks ranks(size);
    Sums sums(ranks);
    std::vector<std::vector<bool>> refused;
    std::vector<std::size_t> counts;
    const int calls = 12;
    for (int call = 0; call < calls; ++call) {
      counts.push_back(1 + random.below(random.below(4) == 0 ? 60'000 : 50));
      refused.emplace_back();
      for (int rank = 0; rank < size; ++rank) refused.back().push_back(random.below(6) == 0);
    }
    Started started(static_cast<std::size_t>(size));
    std::vector<int> next(static_cast<std::size_t>(size), 0);
    Nanoseconds now = 0;
    for (bool more = true; more;) {
      more = false;
      for (int rank = 0; rank < size; ++rank) {
        const auto index = static_cast<std::size_t>(rank);
        auto& mine = started[index];
        // At most two are under way, so that ranks are apart by a few calls.
        const bool waits =
            mine.size() > 2 && mine[mine.size() - 2] != nullptr && !mine[mine.size() - 2]->done();
        if (next[index] == calls) continue;
        more = true;
        if (waits || random.below(3) == 0) continue;
        const auto call = static_cast<std::size_t>(next[index]++);
        if (refused[call][index]) {
          ranks.at(rank).refuse("call " + std::to_string(call));
          mine.push_back(nullptr);
        } else {
          mine.push_back(sums.start(rank, counts[call], 100 * kSecond));
        }
      }
      ranks.run_until(now += static_cast<Nanoseconds>(1 + random.below(40)) * kMillisecond);
    }
    ranks.run_until(now + 20 * kSecond);
    ended += !ended_alike(ranks, size, seed, started, refused);
  }
  CHECK(ended < 15, "%d of 150 worlds ended", ended);
}

RUN_TESTS()
