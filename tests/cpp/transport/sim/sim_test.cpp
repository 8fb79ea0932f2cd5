// What the simulated network promises beyond the contract of every transport: exact replay, virtual
// time, and each awkward feature where and only where it is asked for.

#include "transport/sim/sim.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/prng.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/sim/sim_ranks.h"

namespace pycoll::testing {
namespace {

std::uint64_t hash_of(const Segment& segment) {
  return hash_bytes(segment.data, segment.header.bytes,
                    hash_bytes(&segment.header, sizeof segment.header));
}

// Random traffic among all ranks; returns a hash of all that was received, where and in which
// order.
std::uint64_t random_traffic(Ranks& ranks, std::uint64_t seed, int actions) {
  Prng prng(seed);
  const auto size = static_cast<std::uint64_t>(ranks.network.options().size);
  std::uint64_t hash = kHashSeed;
  for (int action = 0; action < actions; ++action) {
    const auto from = static_cast<int>(prng.below(size));
    const auto to =
        static_cast<int>((static_cast<std::uint64_t>(from) + 1 + prng.below(size - 1)) % size);
    const auto number = static_cast<std::uint32_t>(prng.below(kChannelsMax));
    switch (prng.below(5)) {
      case 0:
        send_one(ranks.send(from, to, number), prng.next(), prng.below(2000));
        break;
      case 1: {
        Notice notice;
        notice.sequence = static_cast<std::uint64_t>(action) + 1;
        ranks.link(from, to).post(notice);
        break;
      }
      case 2:
        ranks.poll_all();
        ranks.network.advance();
        break;
      default:
        if (const Segment* segment = ranks.recv(from, to, number).peek()) {
          hash = hash_bytes(&action, sizeof action, hash) ^ hash_of(*segment);
          ranks.recv(from, to, number).release();
        }
        const std::uint64_t seen = ranks.link(to, from).newest().sequence;
        hash = hash_bytes(&seen, sizeof seen, hash);
    }
  }
  return hash;
}

TEST(a_seed_replays_exactly) {
  std::vector<std::uint64_t> traces;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const SimOptions options = seed % 2 == 0 ? SimOptions::swarm(4, seed)
                                             : SimOptions::swarm_with_faults(4, seed, 200'000);
    Ranks one(options);
    Ranks two(options);
    const std::uint64_t first = random_traffic(one, seed, 4000);
    const std::uint64_t second = random_traffic(two, seed, 4000);
    const std::string text = to_text(options);
    CHECK(first == second, "%s: received something else in the second run", text.c_str());
    CHECK(one.network.trace() == two.network.trace(), "%s: another trace", text.c_str());
    CHECK(one.network.event_count() == two.network.event_count(), "%s: %llu events, then %llu",
          text.c_str(), static_cast<unsigned long long>(one.network.event_count()),
          static_cast<unsigned long long>(two.network.event_count()));
    CHECK(one.now() == two.now(), "%s: another time", text.c_str());
    CHECK(one.network.event_count() > 300, "%s: only %llu events", text.c_str(),
          static_cast<unsigned long long>(one.network.event_count()));
    traces.push_back(one.network.trace());
  }
  std::sort(traces.begin(), traces.end());
  CHECK(std::unique(traces.begin(), traces.end()) == traces.end(), "two seeds, one trace");
}

TEST(time_is_virtual_and_exact) {
  SimOptions options = plain(2);
  options.delay_min = options.delay_max = 500;
  options.kib_time = 10;
  Ranks ranks(options);
  CHECK(ranks.now() == 0 && ranks.network.next_event_time() == kForever, "an event from nothing");
  CHECK(!ranks.network.advance(), "advanced to nothing");
  CHECK(send_one(ranks.send(0, 1), 1, 3000), "a new channel is full");
  CHECK(ranks.network.next_event_time() == 530, "arrives at %lld",
        static_cast<long long>(ranks.network.next_event_time()));
  ranks.network.advance_to(529);
  CHECK(ranks.now() == 529 && ranks.recv(0, 1).peek() == nullptr, "arrived too early");
  CHECK(ranks.network.advance(), "nothing under way");
  CHECK(ranks.now() == 530 && ranks.recv(0, 1).peek() != nullptr, "not there at its time");
  ranks.recv(0, 1).release();
  CHECK(ranks.network.next_event_time() == 1030, "the slot returns at %lld",
        static_cast<long long>(ranks.network.next_event_time()));
  ranks.network.advance_to(5000);
  CHECK(ranks.now() == 5000 && ranks.network.next_event_time() == kForever, "not all happened");
  ranks.network.advance_to(10);
  CHECK(ranks.now() == 5000, "time went back to %lld", static_cast<long long>(ranks.now()));
}

// Sends one segment on each of two channels, many times; counts how often the second arrives first.
int overtakings(SimOptions options, std::uint64_t seed) {
  options.seed = seed;
  Ranks ranks(options);
  int count = 0;
  for (std::uint64_t round = 1; round <= 20; ++round) {
    CHECK(send_one(ranks.send(0, 1, 0), round, 100) && send_one(ranks.send(0, 1, 1), round, 100),
          "seed %llu: full", static_cast<unsigned long long>(seed));
    while (ranks.recv(0, 1, 0).peek() == nullptr && ranks.recv(0, 1, 1).peek() == nullptr) {
      CHECK(ranks.network.advance(), "seed %llu: nothing arrives",
            static_cast<unsigned long long>(seed));
    }
    count += ranks.recv(0, 1, 0).peek() == nullptr;
    ranks.settle();
    for (const std::uint32_t number : {0U, 1U}) ranks.recv(0, 1, number).release();
    ranks.settle();
  }
  return count;
}

TEST(channels_overtake_only_when_asked_to) {
  SimOptions options = plain(2);
  options.delay_max = 50'000;
  int with = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    options.reorder = false;
    CHECK(overtakings(options, seed) == 0, "seed %llu: a channel overtook another",
          static_cast<unsigned long long>(seed));
    options.reorder = true;
    with += overtakings(options, seed);
  }
  CHECK(with > 40, "only %d of 400 pairs came in another order", with);
}

TEST(a_channel_keeps_its_order_always) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Ranks ranks(SimOptions::swarm(2, seed));
    std::uint64_t sent = 0;
    for (std::uint64_t received = 0; received < 50;) {
      if (send_one(ranks.send(0, 1, 3), sent + 1, (sent * 777) % 5000)) ++sent;
      ranks.poll_all();
      if (const Segment* segment = ranks.recv(0, 1, 3).peek()) {
        ++received;
        CHECK(segment->header.sequence == received, "%s: segment %llu instead of %llu",
              to_text(ranks.network.options()).c_str(),
              static_cast<unsigned long long>(segment->header.sequence),
              static_cast<unsigned long long>(received));
        ranks.recv(0, 1, 3).release();
      } else {
        CHECK(ranks.network.advance(), "%s: stuck", to_text(ranks.network.options()).c_str());
      }
    }
  }
}

// What was handed over is read late: who changes it before drained() sees the receiver get that.
TEST(handed_over_memory_is_read_on_arrival) {
  for (const bool partial : {false, true}) {
    SimOptions options = plain(2);
    options.partial = partial;
    Ranks ranks(options);
    std::vector<std::byte> memory(10'000);
    fill(memory.data(), memory.size(), 5);
    CHECK(ranks.send(0, 1).hand_over(header_of(1, memory.size()), memory.data()), "full");
    CHECK(!ranks.send(0, 1).drained(), "drained before anything was read");
    memory.back() = ~memory.back();
    const std::vector<std::byte> expected = memory;
    int pieces = 1;
    while (ranks.network.advance() && ranks.recv(0, 1).peek() == nullptr) {
      CHECK(!ranks.send(0, 1).drained(), "drained while the rest is still to be read");
      ++pieces;
    }
    CHECK(pieces == 1 || partial, "%d pieces", pieces);
    CHECK(ranks.send(0, 1).drained(), "arrived, but not drained");
    std::fill(memory.begin(), memory.end(), std::byte{0});
    const Segment* segment = ranks.recv(0, 1).peek();
    CHECK(segment != nullptr, "nothing arrived");
    CHECK(std::equal(expected.begin(), expected.end(), segment->data), "not as it was on arrival");
  }
}

TEST(pieces_are_drawn_when_asked_for) {
  SimOptions options = plain(2);
  options.partial = true;
  Ranks ranks(options);
  for (std::uint64_t i = 1; i <= 40; ++i) {
    CHECK(send_one(ranks.send(0, 1), i, 5000), "full");
    ranks.settle();
    CHECK(ranks.recv(0, 1).peek() != nullptr, "segment %llu did not arrive",
          static_cast<unsigned long long>(i));
    ranks.recv(0, 1).release();
    ranks.settle();
  }
  CHECK(ranks.network.event_count() > 120, "%llu events for 40 segments and their slots",
        static_cast<unsigned long long>(ranks.network.event_count()));
}

TEST(memory_that_is_no_longer_yours_is_overwritten) {
  Ranks ranks(plain(2));
  std::byte* slot_buffer = ranks.send(0, 1).reserve(100);
  fill(slot_buffer, 100, 1);
  std::vector<std::byte> copy(slot_buffer, slot_buffer + 100);
  ranks.send(0, 1).commit(header_of(1, 100));
  CHECK(!std::equal(copy.begin(), copy.end(), slot_buffer),
        "a committed slot still reads as before");
  ranks.settle();
  const std::byte* data = ranks.recv(0, 1).peek()->data;
  CHECK(std::equal(copy.begin(), copy.end(), data), "arrived changed");
  ranks.recv(0, 1).release();
  CHECK(!std::equal(copy.begin(), copy.end(), data), "a released segment still reads as before");
}

TEST(news_hides_until_poll_when_asked_to) {
  for (const bool hidden : {false, true}) {
    SimOptions options = plain(2);
    options.hide_until_poll = hidden;
    Ranks ranks(options);
    Notice notice;
    notice.sequence = 3;
    ranks.link(0, 1).post(notice);
    for (std::uint64_t i = 1; i <= kChannelDepth; ++i) {
      CHECK(send_one(ranks.send(0, 1), i, 8), "full at %llu", static_cast<unsigned long long>(i));
    }
    while (ranks.network.advance()) {
    }
    CHECK((ranks.recv(0, 1).peek() == nullptr) == hidden, "a segment, hidden: %d", hidden);
    CHECK((ranks.link(1, 0).newest().sequence == 0) == hidden, "a notice, hidden: %d", hidden);
    CHECK(!ranks.at(1).arm(), "slept on news");
    ranks.at(1).disarm();
    CHECK(ranks.at(1).poll(), "poll has nothing to tell");
    CHECK(!ranks.at(1).poll(), "the same news twice");
    CHECK(ranks.at(1).arm(), "cannot sleep without news");
    ranks.at(1).disarm();
    CHECK(ranks.recv(0, 1).peek() != nullptr, "hidden after poll");
    CHECK(ranks.link(1, 0).newest().sequence == 3, "notice hidden after poll");
    ranks.recv(0, 1).release();
    while (ranks.network.advance()) {
    }
    CHECK((ranks.send(0, 1).reserve(8) == nullptr) == hidden, "a slot, hidden: %d", hidden);
    ranks.at(0).poll();
    CHECK(ranks.send(0, 1).reserve(8) != nullptr, "a slot hidden after poll");
    CHECK(ranks.at(0).event_fd() == -1, "a descriptor on a virtual clock");
  }
}

// Counts notices that arrive behind newer ones; the newest must win at any rate.
TEST(the_newest_notice_wins) {
  SimOptions options = plain(2);
  options.delay_max = 20'000;
  options.delay_notices = true;
  int overtaken = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    options.seed = seed;
    Ranks ranks(options);
    for (std::uint64_t number = 1; number <= 10; ++number) {
      Notice notice;
      notice.sequence = number;
      ranks.link(0, 1).post(notice);
    }
    std::uint64_t seen = 0;
    while (ranks.network.advance()) {
      const std::uint64_t newest = ranks.link(1, 0).newest().sequence;
      CHECK(newest >= seen, "seed %llu: %llu after %llu", static_cast<unsigned long long>(seed),
            static_cast<unsigned long long>(newest), static_cast<unsigned long long>(seen));
      overtaken += newest == seen;
      seen = newest;
    }
    CHECK(seen == 10, "seed %llu: ends with %llu", static_cast<unsigned long long>(seed),
          static_cast<unsigned long long>(seen));
  }
  CHECK(overtaken > 100, "only %d of 500 notices came late", overtaken);
}

TEST(a_slow_link_is_slow_in_one_direction) {
  SimOptions options = plain(3);
  options.slow_link = true;
  options.kib_time = 0;
  Ranks ranks(options);
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      if (from != to) CHECK(send_one(ranks.send(from, to), 1, 8), "full");
    }
  }
  ranks.network.advance_to(1'000);
  ranks.poll_all();
  int late = 0;
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) late += from != to && ranks.recv(from, to).peek() == nullptr;
  }
  CHECK(late == 1, "%d segments are late", late);
  CHECK(ranks.network.next_event_time() == 100'000, "the slow one arrives at %lld",
        static_cast<long long>(ranks.network.next_event_time()));
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
