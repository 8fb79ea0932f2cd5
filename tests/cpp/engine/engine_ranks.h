// Engines of all ranks on a virtual network and a virtual clock, stepped by the test's one thread.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tests/cpp/plan/collective_plans.h"
#include "transport/sim/sim.h"

namespace pycoll::testing {

using engine::Engine;
using engine::Operation;

inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSecond = 1000 * kMillisecond;

// The network is plain: constant delays, no faults but those the test makes.
class Ranks {
 public:
  explicit Ranks(int size) : network_(options(size)) {
    for (int rank = 0; rank < size; ++rank) {
      engine::EngineOptions made;
      made.rank = rank;
      made.size = size;
      made.clock = network_.clock();
      made.transports.push_back(network_.transport(rank));
      std::unique_ptr<Engine> engine;
      CHECK(Engine::create(std::move(made), &engine).ok(), "rank %d", rank);
      engines_.push_back(std::move(engine));
    }
  }

  Engine& at(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  transport::Link& link(int from, int to) { return *network_.transport(from)->link(to); }

  // Steps the engines of all ranks but those that are stopped until virtual time `end`.
  void run_until(Nanoseconds end) {
    while (network_.clock()->now() < end) {
      const bool moved = step_all();
      if (!moved) {
        const Nanoseconds tick = network_.clock()->now() + kMillisecond;
        network_.advance_to(std::min({network_.next_event_time(), tick, end}));
      }
    }
  }

  // So many rounds of the same, or fewer if nothing is left to do.
  void run_rounds(std::uint64_t rounds) {
    for (std::uint64_t round = 0; round < rounds; ++round) {
      if (!step_all() && !network_.advance()) return;
    }
  }

  // From now on, or until it goes on, `rank` does nothing, as a process that was sent SIGSTOP.
  void stop(int rank) { stopped_ = rank; }
  void go_on() { stopped_ = -1; }

  // The network alone goes on until then.
  void wait_until(Nanoseconds end) {
    while (network_.clock()->now() < end) {
      network_.advance_to(std::min(network_.next_event_time(), end));
    }
  }

 private:
  bool step_all() {
    bool moved = false;
    for (auto& engine : engines_) {
      if (engine->rank() == stopped_) continue;
      moved |= engine->step();
      moved |= engine->watch();
    }
    return moved;
  }

  static transport::SimOptions options(int size) {
    transport::SimOptions made;
    made.size = size;
    return made;
  }

  transport::SimNetwork network_;
  std::vector<std::unique_ptr<Engine>> engines_;
  int stopped_ = -1;
};

inline void expect(const Operation& operation, Code code, const std::string& text,
                   const std::vector<int>& ranks) {
  CHECK(operation.done(), "not ended, expected: %s", text.c_str());
  const Status& status = operation.status();
  CHECK(status.code() == code, "code %u: %s", static_cast<unsigned>(status.code()),
        status.message().c_str());
  CHECK(status.message() == text, "\n  found    %s\n  expected %s", status.message().c_str(),
        text.c_str());
  CHECK(status.ranks() == ranks, "names other ranks: %s", status.message().c_str());
}

// Starts ring all_reduces, and keeps their memory.
struct Sums {
  explicit Sums(Ranks& all) : ranks(all) {}

  std::shared_ptr<Operation> start(
      int rank, std::size_t count, Nanoseconds timeout,
      const std::function<void(executor::CollectiveRequest&)>& change = nullptr) {
    const int size = ranks.at(rank).size();
    data.push_back(std::make_unique<std::vector<Element>>(input_of(rank, 0, count)));
    auto request = all_reduce(ring_plan(size, rank), *data.back(), *data.back());
    if (change) change(request);
    return ranks.at(rank).start(std::move(request), timeout);
  }

  Ranks& ranks;
  std::vector<std::unique_ptr<std::vector<Element>>> data;
};

}  // namespace pycoll::testing
