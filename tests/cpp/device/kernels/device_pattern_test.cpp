// That the emulated device is unkind enough for Pattern (protocols.h): runs go wrong without the
// order of memory that it asks for, and without each of the things it does.

#include "device/kernels/executor.h"
#include "device/kernels/reductions.h"
#include "tests/cpp/device/kernels/device_faults.h"

namespace pycoll {
namespace {

using device::Protocol;
using testing::Buffers;
using testing::check_found;
using testing::DeviceWorld;
using testing::Fault;
using testing::kSeeds;
using testing::Scenario;
using testing::scenario_of;

// What empties a slot comes before whatever the next segment stores there.
TEST(slots_are_given_back_when_they_are_empty) {
  const char* ring = "all_reduce/ring";
  check_found(ring, Protocol::kPattern, Fault::kNoRelease, "the release of Pattern");
  check_found(ring, Protocol::kPattern, Fault::kNoMeeting, "the block's meeting, Pattern");
  check_found("all_reduce/one_shot", Protocol::kPattern, Fault::kNoRelease,
              "the release of Pattern, one-shot");
}

TEST(words_arrive_whole) {
  const char* what = "whole halves, Pattern";
  check_found("all_reduce/ring", Protocol::kPattern, Fault::kTornHalves, what);
  check_found("all_reduce/direct", Protocol::kPattern, Fault::kTornHalves, what);
}

// --- each part of it left out

struct NeverEmptied : device::Pattern {
  using Pattern::Pattern;
  bool receive(const device::Slot& slot, std::uint32_t unit, std::uint32_t bytes,
               device::Pack* pack, device::Wait& wait) const {
    if (!Pattern::receive(slot, unit, bytes, pack, wait)) return false;
    if (!device::Ll::cleans(slot.step)) device::store16_relaxed(pack_at(slot, unit), *pack);
    return true;
  }
};

struct WithoutLines : device::Pattern {
  using Pattern::Pattern;
  void send(const device::Slot& slot, std::uint32_t unit, std::uint32_t bytes,
            device::Pack pack) const {
    if (device::Ll::cleans(slot.step)) return Pattern::send(slot, unit, bytes, pack);
    device::store16_relaxed(pack_at(slot, unit), pack);
  }
};

// Whole packs where the lines are meant.
struct BlindToNothing : device::Pattern {
  using Pattern::Pattern;
  bool receive(const device::Slot& slot, std::uint32_t unit, std::uint32_t bytes,
               device::Pack* pack, device::Wait& wait) const {
    if (device::Ll::cleans(slot.step)) return Pattern::receive(slot, unit, bytes, pack, wait);
    *pack = device::load16_relaxed(pack_at(slot, unit));
    clear(pack_at(slot, unit));
    return true;
  }
};

struct NeverCleaned : device::Pattern {
  using Pattern::Pattern;
  void empty(const device::Slot& /*slot*/, std::uint32_t /*bytes*/) const {}
};

// Short segments, through all slots, and then long ones. Full of emptiness or not.
template <typename Made>
bool is_right_with(bool is_empty, std::uint64_t seed) {
  const Scenario small = scenario_of("all_reduce/ring", 2, Protocol::kPattern, 3, seed);
  Scenario large = scenario_of("all_reduce/ring", 2, Protocol::kPattern, 300, seed);
  large.is_empty = is_empty;
  DeviceWorld world(testing::shape_of(small));
  world.set_kernel(
      [](const device::Program& program, const device::Call& call, device::Shared& shared) {
        const device::Any reduction{program.dtype, program.op};
        device::Executor<Made, device::Any>(program, call, reduction, shared).run();
      });
  for (int round = 0; round < 5; ++round) {
    const Scenario& one = round < 3 ? small : large;
    const std::vector<Buffers> expected = testing::run_on_host(one);
    std::vector<Buffers> buffers = testing::make_buffers(one);
    if (!world.run({one}, buffers, {.seed = ++seed})) return false;
    if (!(buffers[0].output == expected[0].output)) return false;
    if (!(buffers[1].output == expected[1].output)) return false;
  }
  return true;
}

template <typename Made>
void check_needed(bool is_empty, const char* what) {
  int found = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    CHECK(is_right_with<device::Pattern>(is_empty, seed), "seed %d", static_cast<int>(seed));
    if (!is_right_with<Made>(is_empty, seed)) ++found;
  }
  std::printf("  without %s %d of %d runs go wrong\n", what, found, static_cast<int>(kSeeds));
  CHECK(found > 0, "%s serves nothing", what);
}

TEST(every_part_is_needed) {
  check_needed<NeverEmptied>(false, "emptying what was read");
  check_needed<NeverCleaned>(false, "emptying slots in steps that clean");
  check_needed<WithoutLines>(true, "lines aside");
  check_needed<BlindToNothing>(false, "looking for words that have not come");
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
