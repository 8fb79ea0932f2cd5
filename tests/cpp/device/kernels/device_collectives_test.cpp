// Every schedule that the lowering gives, on emulated devices, against the host's engines bit by
// bit. What a case has besides is drawn from its number: type, operation, sizes around the units of
// the protocols, alignment, shares, threads, order of events, whether data are full of what Pattern
// takes for nothing. TEST_SEED shifts the draws.

#include <algorithm>
#include <cstdlib>

#include "plan/layout.h"
#include "tests/cpp/device/kernels/device_world.h"
#include "tests/cpp/kernels/kernels_cases.h"

namespace pycoll {
namespace {

using testing::Buffers;
using testing::DeviceWorld;
using testing::Scenario;
using testing::Schedule;

std::uint64_t base_seed() {
  const char* text = std::getenv("TEST_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10) * 1'000'003;
}

ReduceOp draw_op(Prng& prng, DType dtype) {
  for (;;) {
    const auto op = static_cast<ReduceOp>(prng.below(kReduceOpCount));
    if (kernels::combine_for(dtype, op, kernels::Isa::kReference)) return op;
  }
}

// Elements of a chunk: none, one, around 16 bytes, around a slot, several times all slots.
std::uint64_t draw_length(Prng& prng, std::uint64_t item, std::uint64_t segment) {
  const std::uint64_t slot = std::max<std::uint64_t>(1, segment / item);
  const std::uint64_t bytes16 = std::max<std::uint64_t>(1, 16 / item);
  switch (prng.below(7)) {
    case 0:
      return 0;
    case 1:
      return 1;
    case 2:
      return bytes16 + prng.below(3) - 1;
    case 3:
      return slot + prng.below(3) - 1;
    case 4:
      return prng.below(3 * slot) + 1;
    case 5:
      return 2 * slot + prng.below(bytes16 + 1);
    default:
      return 6 * slot + prng.below(slot);
  }
}

Scenario draw_case(const Schedule& schedule, device::Protocol protocol, std::uint64_t seed) {
  Prng prng(seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(protocol));
  Scenario one;
  one.schedule = &schedule;
  one.protocol = protocol;
  one.seed = seed;
  one.is_empty = prng.chance(1, 4);
  one.dtype = static_cast<DType>(prng.below(testing::all_dtypes().size()));
  one.op = draw_op(prng, one.dtype);
  one.shares = 1 + static_cast<std::uint32_t>(prng.below(2));
  one.in_place = prng.chance(1, 3);
  one.threads = device::kWarp * (1 + static_cast<std::uint32_t>(prng.below(2)));
  const std::uint64_t item = item_bytes(one.dtype);
  one.misaligned = prng.chance(1, 2) ? item * prng.below(1 + 64 / item) : 0;
  const device::Shape shape = testing::small_shape(schedule, one.shares);
  const std::uint64_t segment = shape.segment_bytes[static_cast<std::size_t>(protocol)];
  const plan::Header& header = schedule.plans[0]->header();
  const std::uint64_t common = draw_length(prng, item, segment);
  for (std::uint32_t block = 0; block < header.block_count; ++block) {
    // Many blocks of many slots each take long and show nothing new.
    const bool is_short = header.block_count > 1 && prng.chance(1, 2);
    const std::uint64_t length = is_short ? draw_length(prng, item, 32) : common;
    one.counts.push_back(header.block_count > 8 ? length % 100
                                                : length * header.parts + prng.below(header.parts));
  }
  if (schedule.collective() == Collective::kAllReduce && prng.chance(1, 2)) {
    one.arrays = 2 + static_cast<std::uint32_t>(prng.below(20));
  }
  if (prng.chance(2, 3)) {
    one.registered = static_cast<std::uint32_t>(prng.next());
    if (prng.chance(1, 2)) one.mapped = static_cast<std::uint32_t>(prng.next());
  }
  return one;
}

void check_case(const Scenario& one, DeviceWorld& world) {
  const std::vector<Buffers> expected = testing::run_on_host(one);
  std::vector<Buffers> buffers = testing::make_buffers(one);
  CHECK(world.run({one}, buffers, {.seed = one.seed}), "a hang: %s", one.to_text().c_str());
  for (std::size_t rank = 0; rank < buffers.size(); ++rank) {
    CHECK(buffers[rank].output == expected[rank].output, "rank %zu differs from the host: %s", rank,
          one.to_text().c_str());
    CHECK(buffers[rank].output.is_whole() && buffers[rank].input.is_whole(),
          "rank %zu wrote outside its buffers: %s", rank, one.to_text().c_str());
  }
}

void check_all(device::Protocol protocol) {
  std::uint64_t seed = base_seed();
  for (const Schedule& schedule : testing::schedules()) {
    const Scenario first = draw_case(schedule, protocol, ++seed);
    DeviceWorld world(testing::small_shape(schedule, 2));
    // Every other time the first segments are not those that clean slots.
    if (Prng(seed).chance(1, 2)) {
      world.set_steps(1000);
      world.empty_slots();
    }
    check_case(first, world);
    // Over the same channels, whose counters go on.
    if (PYCOLL_DEVICE_ROUNDS > 1) check_case(draw_case(schedule, protocol, ++seed), world);
  }
}

TEST(every_schedule_over_ll_gives_the_bits_of_the_host) { check_all(device::Protocol::kLl); }
TEST(every_schedule_over_ll128_gives_the_bits_of_the_host) { check_all(device::Protocol::kLl128); }
TEST(every_schedule_over_simple_gives_the_bits_of_the_host) {
  check_all(device::Protocol::kSimple);
}
TEST(every_schedule_over_pattern_gives_the_bits_of_the_host) {
  check_all(device::Protocol::kPattern);
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
