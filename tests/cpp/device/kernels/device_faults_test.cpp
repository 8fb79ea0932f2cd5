// That the emulated device is unkind enough: each instruction that orders memory, when it is left
// without its effect, is missed by some run. And that hosts end what would wait for ever.

#include "tests/cpp/device/kernels/device_faults.h"
#include "base/clock.h"
#include "tests/cpp/plan/plan_builder.h"

namespace pycoll {
namespace {

using device::Protocol;
using testing::Buffers;
using testing::check_found;
using testing::DeviceWorld;
using testing::Fault;
using testing::gives_the_bits_of_the_host;
using testing::kAll;
using testing::kSeeds;
using testing::Scenario;
using testing::scenario_of;
using testing::Schedule;
using testing::shape_of;

TEST(a_missing_release_is_noticed) {
  check_found("all_reduce/ring", Protocol::kSimple, Fault::kNoRelease, "the release of Simple");
}

TEST(a_missing_acquire_is_noticed) {
  check_found("all_reduce/ring", Protocol::kSimple, Fault::kNoAcquire, "the acquire of Simple");
}

TEST(a_missing_meeting_of_the_block_is_noticed) {
  check_found("all_reduce/ring", Protocol::kSimple, Fault::kNoMeeting, "the block's meeting");
}

// A direct write is ordered as what goes through slots.
TEST(direct_writes_need_release_acquire_and_meetings) {
  const auto check = [](const char* schedule, Fault fault, const char* what) {
    check_found(schedule, Protocol::kSimple, fault, what, true);
  };
  check("all_reduce/direct", Fault::kNoRelease, "the release, direct write");
  check("all_reduce/ring", Fault::kNoAcquire, "the acquire, direct write");
  check("all_reduce/direct", Fault::kNoMeeting, "the block's meeting, direct write");
}

TEST(lines_that_arrive_in_pieces_break_ll128_alone) {
  check_found("all_reduce/ring", Protocol::kLl128, Fault::kTornLines, "whole lines");
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const Scenario one = scenario_of("all_reduce/ring", 3, Protocol::kLl, 600, seed);
    CHECK(gives_the_bits_of_the_host(one, Fault::kTornLines), "%s", one.to_text().c_str());
  }
}

TEST(halves_that_arrive_in_pieces_break_ll) {
  check_found("all_reduce/ring", Protocol::kLl, Fault::kTornHalves, "whole halves, LL");
}

// The same of rows without meetings between them.
TEST(lines_of_joined_lanes_are_all_that_orders_their_data) {
  check_found("all_reduce/one_shot", Protocol::kLl, Fault::kTornHalves, "whole halves, one-shot");
  check_found("all_reduce/direct", Protocol::kLl, Fault::kTornHalves, "whole halves, two-shot");
  check_found("all_reduce/direct", Protocol::kLl128, Fault::kTornLines, "whole lines, two-shot");
}

std::shared_ptr<const plan::Image> load(testing::PlanBuilder& builder) {
  std::shared_ptr<const plan::Image> image;
  testing::PlanBytes bytes = builder.bytes();
  const Status status = plan::Image::load(bytes.span(), &image);
  CHECK(status.ok(), "%s", status.message().c_str());
  return image;
}

// Rank 0's first lane puts the input into its output and tells rank 1, which answers to rank 0's
// second lane, which sends what it finds in the output.
Schedule echo_schedule() {
  using plan::Buffer;
  testing::PlanBuilder root(Collective::kBroadcast, 2, 0);
  root.header.lane_count = 2;
  root.header.scratch_slots = 1;
  const std::uint16_t asks = root.send(1, 0);
  const std::uint16_t hears = root.recv(1, 1);
  const std::uint16_t sends = root.send(1, 1);
  plan::Row& first = root.row(0, {}, {asks});
  testing::take(first, Buffer::kInput, 0);
  testing::put(first, Buffer::kOutput, 0);
  testing::put(root.row(0, {hears}, {}, 1), Buffer::kScratch, 0);
  testing::take(root.row(0, {}, {sends}, 1), Buffer::kOutput, 0);

  testing::PlanBuilder other(Collective::kBroadcast, 2, 1);
  const std::uint16_t asked = other.recv(0, 0);
  const std::uint16_t answers = other.send(0, 1);
  const std::uint16_t gets = other.recv(0, 1);
  other.row(0, {asked}, {answers});
  testing::put(other.row(0, {gets}, {}), Buffer::kOutput, 0);
  return {"broadcast/echo", 2, 0, {load(root), load(other)}};
}

// What one lane wrote is read by another that knows of it through another rank.
TEST(lanes_need_the_order_of_memory_from_every_segment) {
  constexpr std::uint64_t kLaneSeeds = 40;  // in a quarter of them it shows
  const Schedule echo = echo_schedule();
  for (const Protocol protocol : {Protocol::kLl, Protocol::kLl128, Protocol::kPattern}) {
    int found = 0;
    for (std::uint64_t seed = 1; seed <= kLaneSeeds; ++seed) {
      Scenario one;
      one.schedule = &echo;
      one.protocol = protocol;
      one.counts = {10};
      one.seed = seed;
      CHECK(gives_the_bits_of_the_host(one, Fault::kNone), "%s", one.to_text().c_str());
      if (!gives_the_bits_of_the_host(one, Fault::kNone, false)) ++found;
    }
    std::printf("  without it %d of %d runs go wrong\n", found, static_cast<int>(kLaneSeeds));
    CHECK(found > 0, "the order that programs of several lanes ask for serves nothing");
  }
}

// --- counters

// A launch whose parameters never change, as a captured graph replays it.
TEST(launches_can_be_replayed_any_number_of_times) {
  for (const Protocol protocol : kAll) {
    Scenario one = scenario_of("all_reduce/tree", 4, protocol, 700);
    one.registered = 0xb;
    const std::vector<Buffers> expected = testing::run_on_host(one);
    DeviceWorld world(shape_of(one));
    for (std::uint64_t round = 0; round < 20; ++round) {
      std::vector<Buffers> buffers = testing::make_buffers(one);
      CHECK(world.run({one}, buffers, {.seed = round}), "round %d", static_cast<int>(round));
      CHECK(buffers[3].output == expected[3].output, "round %d", static_cast<int>(round));
    }
  }
}

TEST(counters_pass_every_power_of_two) {
  for (const Protocol protocol : kAll) {
    for (const int power : {31, 32, 33, 63}) {
      const Scenario one = scenario_of("all_reduce/ring", 3, protocol, 900);
      const std::vector<Buffers> expected = testing::run_on_host(one);
      DeviceWorld world(shape_of(one));
      world.empty_slots();
      // Who comes to 2^32 has been at 2^31, where memory that was never written gets its flags.
      for (const int passed : {31, power}) {
        world.set_steps((std::uint64_t{1} << passed) - 3);
        std::vector<Buffers> buffers = testing::make_buffers(one);
        CHECK(world.run({one}, buffers, {.seed = 7}), "2^%d", passed);
        CHECK(buffers[1].output == expected[1].output, "2^%d", passed);
      }
    }
  }
}

// Lines of Ll that no message has reached for 2^32 segments bear the flags that come next.
bool survives_old_flags(Protocol protocol, bool passes_cleaning, std::uint64_t seed) {
  const Scenario large = scenario_of("all_reduce/ring", 2, protocol, 100, seed);
  const Scenario small = scenario_of("all_reduce/ring", 2, protocol, 1, seed);
  DeviceWorld world(shape_of(large));
  std::vector<Buffers> buffers = testing::make_buffers(large);
  CHECK(world.run({large}, buffers, {.seed = seed}), "the first time");
  if (passes_cleaning) {
    world.set_steps((std::uint64_t{1} << 31) - 3);
    for (int round = 0; round < 5; ++round) {
      buffers = testing::make_buffers(small);
      CHECK(world.run({small}, buffers, {.seed = seed}), "round %d", round);
    }
  }
  world.set_steps(std::uint64_t{1} << 32);
  Scenario again = large;
  again.seed += 1000;
  const std::vector<Buffers> expected = testing::run_on_host(again);
  buffers = testing::make_buffers(again);
  CHECK(world.run({again}, buffers, {.seed = seed}), "the last time");
  return buffers[0].output == expected[0].output && buffers[1].output == expected[1].output;
}

TEST(flags_that_are_old_enough_to_come_again_are_cleaned_away) {
  for (const Protocol protocol : {Protocol::kLl, Protocol::kPattern}) {
    int wrong = 0;
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
      CHECK(survives_old_flags(protocol, true, seed), "seed %d", static_cast<int>(seed));
      if (!survives_old_flags(protocol, false, seed)) ++wrong;
    }
    CHECK(wrong > 0, "the danger that is cleaned away does not exist");
  }
}

// --- hosts

class ManualClock final : public Clock {
 public:
  Nanoseconds now() override { return now_; }
  void advance(Nanoseconds by) { now_ += by; }

 private:
  Nanoseconds now_ = 0;
};

// A world with a host that watches every rank; time passes only while devices are stuck.
struct Watched {
  explicit Watched(const device::Shape& shape) : world(shape) {
    for (std::uint32_t rank = 0; rank < shape.size; ++rank) {
      watches.emplace_back(world.words(rank), clock, [](std::uint32_t) { return "all_reduce"; });
      watches.back().set_timeout(Nanoseconds{1'000'000'000});
    }
  }
  bool look(bool stuck) {
    if (stuck) clock.advance(100'000'000);
    bool told = stuck && clock.now() <= Nanoseconds{2'000'000'000};
    for (device::Watch& watch : watches) told |= watch.look();
    return told;
  }

  ManualClock clock;
  DeviceWorld world;
  std::vector<device::Watch> watches;
};

TEST(a_rank_that_does_not_come_is_named_when_the_deadline_has_passed) {
  for (const Protocol protocol : kAll) {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      Scenario one = scenario_of("all_reduce/direct", 3, protocol, 36, seed);
      one.registered = ~0u;
      Watched watched(shape_of(one));
      std::vector<Buffers> buffers = testing::make_buffers(one);
      const bool ended = watched.world.run({one, one, Scenario{}}, buffers, {.seed = seed},
                                           [&](bool stuck) { return watched.look(stuck); });
      CHECK(ended, "kernels do not end: %s", one.to_text().c_str());
      const Status status = watched.watches[0].outcome();
      CHECK(status.code() == Code::kTimeout && status.ranks() == std::vector<int>{2} &&
                status.message() ==
                    "all_reduce: not done after 1 s; the device still waited for ranks 2",
            "%s: %s", one.to_text().c_str(), status.message().c_str());
    }
  }
}

TEST(ranks_that_disagree_stop_and_name_the_other) {
  const auto disagree = [](const Scenario& one, const Scenario& other, std::uint64_t seed) {
    Watched watched(shape_of(one));
    std::vector<Buffers> buffers = testing::make_buffers(one);
    std::vector<Buffers> others = testing::make_buffers(other);
    buffers[1] = others[1];
    const bool ended = watched.world.run({one, other}, buffers, {.seed = seed},
                                         [&](bool stuck) { return watched.look(stuck); });
    CHECK(ended, "kernels do not end: %s", other.to_text().c_str());
    int odd = 0;
    for (int rank = 0; rank < 2; ++rank) {
      const Status status = watched.watches[static_cast<std::size_t>(rank)].outcome();
      CHECK(!status.ok(), "rank %d has noticed nothing: %s", rank, other.to_text().c_str());
      if (status.code() != Code::kMismatch) continue;
      ++odd;
      CHECK(status.ranks() == std::vector<int>{1 - rank} &&
                status.message().find("all ranks must call alike") != std::string::npos,
            "%s", status.message().c_str());
    }
    CHECK(odd > 0, "nobody says what is wrong: %s", other.to_text().c_str());
  };
  for (const Protocol protocol : kAll) {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      Scenario one = scenario_of("all_reduce/direct", 2, protocol, 304, seed);
      one.registered = ~0u;
      Scenario other = one;
      other.dtype = DType::kFloat32;
      disagree(one, other, seed);
      other = one;
      other.op = ReduceOp::kMax;
      disagree(one, other, seed);
      other = one;
      other.counts = {7};
      disagree(one, other, seed);
      other.counts = {900};
      disagree(one, other, seed);
    }
  }
}

TEST(a_host_that_gives_up_ends_its_kernels_in_the_middle) {
  for (const Protocol protocol : kAll) {
    int ended_early = 0;
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
      Scenario one = scenario_of("all_reduce/tree", 4, protocol, 2000, seed);
      one.registered = ~0u;
      Watched watched(shape_of(one));
      std::vector<Buffers> buffers = testing::make_buffers(one);
      std::uint64_t looks = 0;
      const bool ended = watched.world.run({one}, buffers, {.seed = seed}, [&](bool stuck) {
        if (++looks < seed) return watched.look(stuck);
        for (device::Watch& watch : watched.watches) {
          watch.give_up(Status::error(Code::kPeerLost, "rank 3 was killed", {3}));
        }
        return true;
      });
      CHECK(ended, "kernels do not end: %s", one.to_text().c_str());
      for (device::Watch& watch : watched.watches) {
        const Status status = watch.outcome();
        if (status.ok()) continue;
        ++ended_early;
        CHECK(status.code() == Code::kPeerLost && status.message() == "rank 3 was killed", "%s",
              status.message().c_str());
      }
      for (const Buffers& one_rank : buffers) {
        CHECK(one_rank.output.is_whole(), "written outside: %s", one.to_text().c_str());
      }
    }
    CHECK(ended_early > 0, "nothing was in the middle of anything");
  }
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
