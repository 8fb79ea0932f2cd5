// Ranks that outnumber the cores spread themselves evenly over them.
#include "engine/waiting/cpu_balancer.h"

#include <algorithm>
#include <random>
#include <vector>

#include "base/cores.h"
#include "tests/cpp/support/check.h"

using pycoll::Nanoseconds;
using pycoll::engine::CpuBalancer;
using pycoll::engine::less_loaded_core;
using pycoll::transport::CoreHints;

namespace {

// All peers run where the last one who told it does.
class OneCore final : public CoreHints {
 public:
  void share_cores() override {}
  void tell_core(int core) override { told_ = core; }
  int core_of(int) override { return told_; }
  int told() const { return told_; }

 private:
  int told_ = -1;
};

class SetClock final : public pycoll::Clock {
 public:
  Nanoseconds now() override { return now_; }
  void pass(Nanoseconds time) { now_ += time; }

 private:
  Nanoseconds now_ = 1'000'000'000;
};

std::ptrdiff_t ranks_on(const std::vector<int>& cores, int core) {
  return std::count(cores.begin(), cores.end(), core);
}

std::ptrdiff_t most(const std::vector<int>& cores, const std::vector<int>& usable) {
  std::ptrdiff_t found = 0;
  for (const int core : usable) found = std::max(found, ranks_on(cores, core));
  return found;
}

// So many waits that some look finds a better core, or that none would.
int better_core_soon(CpuBalancer& spread, SetClock& clock) {
  for (int wait = 0; wait < 64; ++wait) {
    const int better = spread.better_core(clock);
    if (better >= 0) return better;
  }
  return -1;
}

}  // namespace

TEST(the_highest_rank_of_the_fullest_core_goes_to_the_emptiest) {
  const std::vector<int> cores = {3, 3, 7, 3, 3, 7, 3, -1};
  for (int rank = 0; rank < 8; ++rank) {
    const int better = less_loaded_core(cores, rank, {3, 7});
    CHECK(better == (rank == 6 ? 7 : -1), "rank %d to core %d", rank, better);
  }
  CHECK(less_loaded_core(cores, 6, {3}) == -1, "to a core that it must not use");
  CHECK(less_loaded_core(cores, 6, {7, 9}) == -1, "from a core that it does not share");
  CHECK(less_loaded_core({0, 0, 1}, 1, {0, 1}) == -1, "though that makes nothing even");
  CHECK(less_loaded_core({0, 0}, 1, {0, 1}) == 1, "rank 1 stays");
}

TEST(wherever_ranks_are_they_end_up_even) {
  std::mt19937 random(20);
  for (int round = 0; round < 500; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 40);
    std::vector<int> usable(1 + random() % 9);
    for (std::size_t i = 0; i < usable.size(); ++i) usable[i] = static_cast<int>(2 * i + 1);
    std::vector<int> cores(static_cast<std::size_t>(ranks));
    for (int& core : cores) core = usable[random() % usable.size()];
    for (int turn = 0; turn < ranks; ++turn) {
      // All look at once, and then go.
      std::vector<int> after = cores;
      for (int rank = 0; rank < ranks; ++rank) {
        const int better = less_loaded_core(cores, rank, usable);
        if (better >= 0) after[static_cast<std::size_t>(rank)] = better;
      }
      CHECK(most(after, usable) <= most(cores, usable), "round %d: fuller", round);
      cores = after;
    }
    const auto even =
        (ranks + static_cast<int>(usable.size()) - 1) / static_cast<int>(usable.size());
    CHECK(most(cores, usable) == even, "round %d: %d ranks, %zu cores, %td on one", round, ranks,
          usable.size(), most(cores, usable));
  }
}

TEST(a_rank_tells_where_it_runs_and_moves_at_most_every_10_ms) {
  OneCore medium;
  SetClock clock;
  CpuBalancer last(7, 8, 2, {&medium}), first(0, 8, 2, {&medium});
  const auto usable = pycoll::usable_core_numbers();
  CHECK(better_core_soon(first, clock) == -1, "not the highest on its core");
  CHECK(std::count(usable.begin(), usable.end(), medium.told()) == 1, "core %d", medium.told());
  const int better = better_core_soon(last, clock);
  if (usable.size() < 2) {
    CHECK(better == -1, "core %d, of one", better);
    return;
  }
  CHECK(std::count(usable.begin(), usable.end(), better) == 1, "core %d", better);
  CHECK(better_core_soon(last, clock) == -1, "at once again");
  clock.pass(10'000'000);
  CHECK(better_core_soon(last, clock) >= 0, "never again");
}

TEST(ranks_that_are_even_stay) {
  OneCore medium;
  SetClock clock;
  CpuBalancer one(7, 8, 1, {&medium});  // all on the only core
  CHECK(better_core_soon(one, clock) == -1, "moves");
}

TEST(a_thread_that_was_moved_may_run_where_it_might_before) {
  const auto usable = pycoll::usable_core_numbers();
  CHECK(static_cast<int>(usable.size()) == pycoll::usable_cores(), "%zu", usable.size());
  for (const int core : usable) {
    pycoll::move_to_core(core);
    CHECK(pycoll::usable_core_numbers() == usable, "bound by the move to core %d", core);
  }
  pycoll::move_to_core(-1);
  pycoll::move_to_core(1 << 20);
  CHECK(pycoll::usable_core_numbers() == usable, "bound by a move to nowhere");
}

RUN_TESTS()
