// The simulated network's faults and ends: cuts, deaths, closing, and the swarms that draw them.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/sim/sim_ranks.h"
#include "transport/sim/sim.h"

namespace pycoll::testing {
namespace {

TEST(a_cut_is_seen_by_both_ends_at_once) {
  SimOptions options = plain(3);
  options.cuts.push_back({0, 2, 5'000});
  Ranks ranks(options);
  std::vector<std::byte> memory(1000);
  CHECK(send_one(ranks.send(0, 2), 7, 50), "full");
  ranks.network.advance_to(4'900);
  CHECK(ranks.send(0, 2).hand_over(header_of(8, 1000), memory.data()), "full");
  CHECK(send_one(ranks.send(0, 1), 9, 50), "full");
  ranks.poll_all();
  CHECK(ranks.link(0, 2).state() == LinkState::kOpen, "cut too early");
  ranks.network.advance_to(5'000);
  CHECK(ranks.link(2, 0).state() == LinkState::kOpen, "a state changed without poll");
  CHECK(ranks.send(0, 2).drained(), "a broken link still reads");
  ranks.poll_all();
  for (const auto& [rank, peer] : {std::pair{0, 2}, {2, 0}}) {
    CHECK(ranks.link(rank, peer).state() == LinkState::kLost, "rank %d does not see the cut", rank);
    CHECK(ranks.link(rank, peer).reason() == "the link between ranks 0 and 2 was cut", "%s",
          ranks.link(rank, peer).reason().c_str());
  }
  memory.assign(1, std::byte{});
  memory.shrink_to_fit();
  ranks.settle();
  CHECK(ranks.recv(0, 2).peek() != nullptr && ranks.recv(0, 2).peek()->header.sequence == 7,
        "what had arrived before is gone");
  ranks.recv(0, 2).release();
  CHECK(ranks.recv(0, 2).peek() == nullptr, "something crossed the cut");
  CHECK(ranks.recv(0, 1).peek() != nullptr, "another link suffered");
  CHECK(
      ranks.link(1, 0).state() == LinkState::kOpen && ranks.link(1, 2).state() == LinkState::kOpen,
      "another link was lost");
}

TEST(the_dead_do_nothing_and_are_missed_in_time) {
  SimOptions options = plain(3);
  options.deaths.push_back({1, 10'000, 4'000});
  Ranks ranks(options);
  CHECK(send_one(ranks.send(1, 0), 7, 50), "full");
  ranks.network.advance_to(9'900);
  CHECK(send_one(ranks.send(1, 2), 8, 50), "full");
  CHECK(send_one(ranks.send(0, 1), 9, 50), "full");
  CHECK(!ranks.network.dead(1), "dead too early");
  ranks.network.advance_to(10'000);
  CHECK(ranks.network.dead(1) && !ranks.network.dead(0), "not dead in time");
  CHECK(ranks.send(1, 0).reserve(8) == nullptr, "a dead rank has a free slot");
  const std::byte data[8] = {};
  CHECK(!ranks.send(1, 0).hand_over(header_of(1, 0), data), "a dead rank sends");
  CHECK(ranks.recv(0, 1).peek() == nullptr, "a dead rank receives");
  ranks.recv(0, 1).release();
  Notice notice;
  notice.sequence = 1;
  ranks.link(1, 0).post(notice);
  CHECK(!ranks.at(1).poll(), "a dead rank has news");
  ranks.at(1).close();
  ranks.network.advance_to(14'000);
  ranks.poll_all();
  for (const int rank : {0, 2}) {
    CHECK(ranks.link(rank, 1).state() == LinkState::kLost, "rank %d did not hear of it", rank);
    CHECK(ranks.link(rank, 1).reason() == "rank 1 died", "%s",
          ranks.link(rank, 1).reason().c_str());
    CHECK(ranks.link(rank, 1).newest().sequence == 0, "a notice from a dead rank");
  }
  CHECK(ranks.recv(1, 0).peek() != nullptr, "what had arrived before the death is gone");
  CHECK(ranks.recv(1, 2).peek() == nullptr, "what was under way arrived");
  CHECK(ranks.link(0, 2).state() == LinkState::kOpen, "the survivors lost each other");
}

TEST(a_closed_rank_cannot_die) {
  Ranks ranks(plain(2));
  CHECK(send_one(ranks.send(0, 1), 7, 50), "full");
  ranks.at(0).close();
  ranks.network.kill(0);
  ranks.settle();
  CHECK(!ranks.network.dead(0), "died after its end");
  CHECK(ranks.link(1, 0).state() == LinkState::kClosed, "a close became a loss");
  CHECK(ranks.recv(0, 1).peek() != nullptr, "sent before the close, but lost");
}

TEST(close_reads_what_was_handed_over) {
  Ranks ranks(plain(2));
  auto memory = std::make_unique<std::vector<std::byte>>(3000);
  fill(memory->data(), memory->size(), 9);
  const std::vector<std::byte> expected = *memory;
  CHECK(ranks.send(0, 1).hand_over(header_of(1, 3000), memory->data()), "full");
  ranks.at(0).close();
  memory.reset();
  ranks.settle();
  const Segment* segment = ranks.recv(0, 1).peek();
  CHECK(segment != nullptr, "lost by the close");
  CHECK(std::equal(expected.begin(), expected.end(), segment->data), "changed by the close");
}

// An operation that failed gives its memory back although the link lives on.
TEST(let_go_reads_what_was_handed_over) {
  SimOptions options = plain(2);
  options.partial = true;
  Ranks ranks(options);
  auto memory = std::make_unique<std::vector<std::byte>>(3000);
  fill(memory->data(), memory->size(), 9);
  const std::vector<std::byte> expected = *memory;
  CHECK(ranks.send(0, 1).hand_over(header_of(1, 3000), memory->data()), "full");
  ranks.network.advance();
  ranks.at(0).let_go(transport::LetGo::kAll);
  CHECK(ranks.send(0, 1).drained(), "still reads after let_go");
  memory.reset();
  CHECK(ranks.send(0, 1).hand_over(header_of(2, 3000), expected.data()), "full afterwards");
  CHECK(!ranks.send(0, 1).drained(), "drained before anything was read");
  ranks.settle();
  for (std::uint64_t sequence = 1; sequence <= 2; ++sequence) {
    const Segment* segment = ranks.recv(0, 1).peek();
    CHECK(segment != nullptr && segment->header == header_of(sequence, 3000),
          "segment %llu is lost", static_cast<unsigned long long>(sequence));
    CHECK(std::equal(expected.begin(), expected.end(), segment->data), "changed by let_go");
    ranks.recv(0, 1).release();
  }
  CHECK(ranks.send(0, 1).drained(), "arrived, but not drained");
}

TEST(ends_may_outlive_the_network) {
  auto ranks = std::make_unique<Ranks>(plain(2));
  const std::shared_ptr<Transport> left = ranks->network.transport(0);
  const std::shared_ptr<Clock> clock = ranks->network.clock();
  CHECK(send_one(ranks->send(0, 1), 1, 10), "full");
  ranks->network.advance();
  ranks.reset();
  CHECK(clock->now() == 1'100, "the time is %lld", static_cast<long long>(clock->now()));
  CHECK(left->link(1) != nullptr && left->link(0) == nullptr && left->link(2) == nullptr &&
            left->link(-1) == nullptr,
        "links");
  CHECK(send_one(left->link(1)->send_channel(0), 2, 10), "full");
  left->close();
}

TEST(swarms_differ_and_faults_are_valid) {
  constexpr int kSeeds = 400;
  constexpr Nanoseconds kHorizon = 1'000'000;
  bool SimOptions::* const features[] = {
      &SimOptions::slow_link,           &SimOptions::reorder,       &SimOptions::partial,
      &SimOptions::jitter_slot_buffers, &SimOptions::delay_notices, &SimOptions::hide_until_poll};
  int on[std::size(features)] = {};
  int cuts = 0, deaths = 0, early = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const SimOptions calm = SimOptions::swarm(5, seed);
    const SimOptions options = SimOptions::swarm_with_faults(5, seed, kHorizon);
    CHECK(calm.cuts.empty() && calm.deaths.empty(), "seed %llu: %s",
          static_cast<unsigned long long>(seed), to_text(calm).c_str());
    CHECK(!options.cuts.empty() || !options.deaths.empty(), "no fault: %s",
          to_text(options).c_str());
    for (std::size_t i = 0; i < std::size(features); ++i) on[i] += options.*features[i];
    for (const SimCut& cut : options.cuts) {
      CHECK(0 <= cut.first && cut.first < 5 && 0 <= cut.second && cut.second < 5 &&
                cut.first != cut.second && 0 <= cut.at && cut.at <= kHorizon,
            "%s", to_text(options).c_str());
      ++cuts;
    }
    for (const SimDeath& death : options.deaths) {
      CHECK(0 <= death.rank && death.rank < 5 && 0 <= death.at && death.at <= kHorizon &&
                death.detection_max >= 0,
            "%s", to_text(options).c_str());
      ++deaths;
      early += death.at < kHorizon / 1000;
    }
  }
  for (std::size_t i = 0; i < std::size(features); ++i) {
    CHECK(on[i] > kSeeds / 6 && on[i] < kSeeds * 5 / 6, "feature %zu is on in %d of %d", i, on[i],
          kSeeds);
  }
  CHECK(cuts > 50 && deaths > 100 && early > 20, "%d cuts, %d deaths, %d early", cuts, deaths,
        early);
}

TEST(options_speak) {
  SimOptions options = plain(4);
  options.seed = 77;
  options.delay_max = 2000;
  options.reorder = options.partial = true;
  options.deaths.push_back({2, 1200, 50});
  options.cuts.push_back({0, 3, 9});
  const std::string expected =
      "size 4, seed 77: delay 1000..2000 ns, 100 ns per KiB, reorder, partial, rank 2 dies at 1200 "
      "ns (told within 50 ns), link 0-3 is cut at 9 ns";
  CHECK(to_text(options) == expected, "%s", to_text(options).c_str());
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
