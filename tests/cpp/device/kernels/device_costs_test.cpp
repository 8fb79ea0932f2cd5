// What operations cost that no time tells here: meetings of blocks, fences, lines stored for peers.
// docs/internals/device.md quotes these figures.

#include "device/kernels/kernels.h"
#include "tests/cpp/device/kernels/device_world.h"

namespace pycoll {
namespace {

using device::Protocol;
using testing::Buffers;
using testing::Counts;
using testing::DeviceWorld;
using testing::Scenario;

Scenario scenario_of(const std::string& schedule, std::uint32_t size, Protocol protocol,
                     std::uint64_t count) {
  Scenario one;
  one.schedule = &testing::find_schedule(schedule, size);
  one.protocol = protocol;
  one.dtype = DType::kInt32;
  one.counts.assign(one.schedule->plans[0]->header().block_count, count);
  return one;
}

// Of rank 0's block, over channels that are idle: slots are free at once.
Counts counts_of(const Scenario& one, bool is_joined) {
  DeviceWorld world(testing::small_shape(*one.schedule, 1));
  world.set_steps(1000);  // the first ones write whole slots
  world.empty_slots();
  std::vector<Buffers> buffers = testing::make_buffers(one);
  std::vector<Counts> counts;
  CHECK(world.run({one}, buffers, {.counts = &counts}), "a hang: %s", one.to_text().c_str());
  CHECK(world.is_joined(0) == is_joined, "%s is %sjoined", one.to_text().c_str(),
        is_joined ? "not " : "");
  CHECK(buffers[0].output == testing::run_on_host(one)[0].output, "%s", one.to_text().c_str());
  return counts[0];
}

// `sends`: segments that a rank sends; `peers`: channels that it receives from.
void check_one(const char* schedule, std::uint32_t size, std::uint64_t sends, std::uint64_t count,
               Protocol protocol) {
  const Counts counts = counts_of(scenario_of(schedule, size, protocol, count), true);
  const std::uint64_t peers = size - 1;
  std::printf("  %s on %u ranks, %s: %d meetings, %d fences, %d releases, %d lines, %d emptied\n",
              schedule, size, device::name_of(protocol), static_cast<int>(counts.meetings),
              static_cast<int>(counts.fences), static_cast<int>(counts.releases),
              static_cast<int>(counts.lines), static_cast<int>(counts.emptied));
  CHECK(counts.meetings == 2 && counts.fences == 0, "not one push and one poll");
  CHECK(counts.releases == peers, "a release gives back all that a channel brought");
  CHECK(counts.acquires == sends, "free slots are looked at once each");
  // A header, and two lines for up to 16 bytes, or one; as many come as go.
  const bool is_pattern = protocol == Protocol::kPattern;
  CHECK(counts.lines == (is_pattern ? 2 : 3) * sends, "something is stored that nobody needs");
  CHECK(counts.emptied == (is_pattern ? sends : 0), "what was read is emptied once");
}

void check(const char* schedule, std::uint32_t size, std::uint64_t sends, std::uint64_t count) {
  check_one(schedule, size, sends, count, Protocol::kLl);
  check_one(schedule, size, sends, count, Protocol::kPattern);
}

TEST(one_shot_is_one_push_and_one_poll) {
  for (const std::uint32_t size : {2, 3, 4, 8}) check("all_reduce/one_shot", size, size - 1, 2);
}

// Every rank pushes parts, reduces its own, and pushes the result: two hops.
TEST(two_shot_is_two_hops_between_two_meetings) {
  for (const std::uint32_t size : {2, 3, 4, 8}) {
    check("all_reduce/direct", size, 2 * (size - 1ull), size);
  }
}

TEST(what_tells_by_its_header_alone_is_not_joined) {
  // Simple's data lie behind headers: two rows with two meetings each.
  const Counts simple =
      counts_of(scenario_of("all_reduce/one_shot", 4, Protocol::kSimple, 2), false);
  CHECK(simple.meetings == 4 && simple.fences == 6, "%d meetings, %d fences",
        static_cast<int>(simple.meetings), static_cast<int>(simple.fences));
  // Tokens are nothing but headers; a ring's channels carry more than their slots hold.
  (void)counts_of(scenario_of("broadcast/direct", 4, Protocol::kLl, 2), false);
  (void)counts_of(scenario_of("all_reduce/ring", 4, Protocol::kLl, 8), false);
}

// In two-shot the owner of a part has heard of all outputs when it has reduced: every other rank's
// result is written directly, and nobody copies anything. `packs`: of 16 bytes, of a rank's part.
TEST(results_are_written_to_registered_outputs_and_nobody_copies) {
  constexpr std::uint64_t kPacks = 8;
  for (const std::uint32_t size : {2, 3, 4, 8}) {
    Scenario one =
        scenario_of("all_reduce/direct", size, Protocol::kSimple, std::uint64_t{size} * kPacks * 4);
    const Counts copied = counts_of(one, false);
    one.registered = ~0u;
    const Counts direct = counts_of(one, false);
    const std::uint64_t peers = size - 1;
    std::printf(
        "  on %u ranks, per rank and 16 bytes of a part: %d stores and %d loads, %d and %d\n", size,
        static_cast<int>(copied.stores / kPacks), static_cast<int>(copied.loads / kPacks),
        static_cast<int>(direct.stores / kPacks), static_cast<int>(direct.loads / kPacks));
    // Parts and results to slots of peers, the own result, those of the others.
    CHECK(copied.stores == kPacks * (2 * peers + 1 + peers), "stores without");
    CHECK(copied.loads == kPacks * (peers + size + peers), "loads without");
    CHECK(direct.stores == kPacks * (2 * peers + 1), "stores of direct writes");
    CHECK(direct.loads == kPacks * (peers + size), "loads of direct writes");
    // At the beginning channels and windows; a look behind what the row that reduces has received.
    CHECK(direct.meetings == copied.meetings + 2, "%d meetings", static_cast<int>(direct.meetings));
    CHECK(direct.fences == copied.fences, "%d fences", static_cast<int>(direct.fences));
    CHECK(direct.releases == copied.releases + peers, "a window for each channel");
    CHECK(direct.acquires == copied.acquires + 2 * peers, "a look for each segment sent");
  }
}

// Of what comes with the receiver's own sends in between nothing is known at the beginning.
TEST(what_is_sent_before_its_receiver_was_heard_of_takes_slots) {
  Scenario one = scenario_of("all_gather/direct", 4, Protocol::kSimple, 1600);
  one.registered = ~0u;
  const Counts direct = counts_of(one, false);
  CHECK(direct.loads < 1600u / 4 * 8, "no direct writes in the tiles behind the first: %d loads",
        static_cast<int>(direct.loads));
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
