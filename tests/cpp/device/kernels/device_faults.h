// Runs of emulated devices that lack something, and whether their results show it.
#pragma once

#include <cstdio>
#include <set>
#include <string>

#include "tests/cpp/device/kernels/device_world.h"

namespace pycoll::testing {

using device::Protocol;

inline constexpr Protocol kAll[] = {Protocol::kLl, Protocol::kLl128, Protocol::kSimple,
                                    Protocol::kPattern};

inline Scenario scenario_of(const std::string& schedule, std::uint32_t size, Protocol protocol,
                            std::uint64_t count, std::uint64_t seed = 1) {
  Scenario one;
  one.schedule = &find_schedule(schedule, size);
  one.protocol = protocol;
  one.dtype = DType::kInt32;
  one.counts.assign(one.schedule->plans[0]->header().block_count, count);
  one.threads = 2 * device::kWarp;
  one.seed = seed;
  return one;
}

// Segments of Pattern are short as well, so that slots are used again and again.
inline device::Shape shape_of(const Scenario& one) {
  device::Shape shape = small_shape(*one.schedule, 1);
  shape.segment_bytes[static_cast<std::size_t>(Protocol::kPattern)] = 80;
  return shape;
}

inline bool gives_the_bits_of_the_host(const Scenario& one, Fault fault, bool in_order = true) {
  const std::vector<Buffers> expected = run_on_host(one);
  std::vector<Buffers> buffers = make_buffers(one);
  DeviceWorld world(shape_of(one));
  if (!in_order) world.forget_order();
  // Twice, so that slots hold old bytes that look like new ones.
  for (int round = 0; round < 2; ++round) {
    buffers = make_buffers(one);
    if (!world.run({one}, buffers, {one.seed + static_cast<std::uint64_t>(round), fault})) {
      return false;
    }
    for (std::size_t rank = 0; rank < buffers.size(); ++rank) {
      if (!(buffers[rank].output == expected[rank].output)) return false;
    }
  }
  return true;
}

// Without a fault, which several tests ask of the same runs.
inline void check_sound(const Scenario& one) {
  static std::set<std::string> sound;
  const std::string text = one.to_text();
  if (sound.contains(text)) return;
  CHECK(gives_the_bits_of_the_host(one, Fault::kNone), "%s", text.c_str());
  sound.insert(text);
}

inline constexpr std::uint64_t kSeeds = 10 * PYCOLL_DEVICE_ROUNDS;

inline void check_found(const char* schedule, Protocol protocol, Fault fault, const char* what,
                        bool is_direct = false) {
  int found = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Scenario one = scenario_of(schedule, 3, protocol, is_direct ? 612 : 600, seed);
    one.registered = is_direct ? ~0u : 0;
    check_sound(one);
    if (!gives_the_bits_of_the_host(one, fault)) ++found;
  }
  std::printf("  %s: %d of %d runs notice\n", what, found, static_cast<int>(kSeeds));
  CHECK(found > 0, "nobody misses %s", what);
}

}  // namespace pycoll::testing
