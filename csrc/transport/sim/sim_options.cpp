#include "transport/sim/sim_options.h"

#include <utility>

#include "base/assert.h"
#include "base/prng.h"

namespace pycoll::transport {
namespace {

// Draws from 1 to 2^bits - 1 so that all magnitudes are equally likely.
Nanoseconds draw_magnitude(Prng& prng, std::uint64_t bits) {
  const std::uint64_t bound = std::uint64_t{1} << prng.below(bits);
  return static_cast<Nanoseconds>(bound + prng.below(bound));
}

}  // namespace

SimOptions SimOptions::swarm(int size, std::uint64_t seed) {
  Prng prng(seed ^ 0x5eedf00d);
  SimOptions options;
  options.size = size;
  options.seed = seed;
  options.delay_min = draw_magnitude(prng, 14);
  options.delay_max = options.delay_min;
  if (prng.chance(3, 4)) options.delay_max += draw_magnitude(prng, 18);
  options.kib_time = static_cast<Nanoseconds>(prng.below(1'000));
  options.slow_link = prng.chance(1, 3);
  options.reorder = prng.chance(1, 2);
  options.partial = prng.chance(1, 2);
  options.jitter_slot_buffers = prng.chance(1, 2);
  options.delay_notices = prng.chance(1, 2);
  options.hide_until_poll = prng.chance(1, 2);
  return options;
}

SimOptions SimOptions::swarm_with_faults(int size, std::uint64_t seed, Nanoseconds horizon) {
  PYCOLL_ASSERT(size >= 2 && horizon > 0, "size is %d, horizon %lld", size,
                static_cast<long long>(horizon));
  SimOptions options = swarm(size, seed);
  Prng prng(seed ^ 0xfa17fa17);
  const auto ranks = static_cast<std::uint64_t>(size);
  const auto when = [&] {
    const auto bound = static_cast<std::uint64_t>(horizon) >> prng.below(16);
    return static_cast<Nanoseconds>(prng.below(bound + 1));
  };
  const std::uint64_t kind = prng.below(4);
  if (kind != 0) {
    const auto rank = static_cast<int>(prng.below(ranks));
    const Nanoseconds at = when();
    options.deaths.push_back({rank, at, draw_magnitude(prng, 22)});
  }
  if (kind == 0 || kind == 3) {
    const std::uint64_t first = prng.below(ranks);
    const std::uint64_t second = (first + 1 + prng.below(ranks - 1)) % ranks;
    options.cuts.push_back({static_cast<int>(first), static_cast<int>(second), when()});
  }
  return options;
}

std::string to_text(const SimOptions& options) {
  std::string text = "size " + std::to_string(options.size) + ", seed " +
                     std::to_string(options.seed) + ": delay " + std::to_string(options.delay_min) +
                     ".." + std::to_string(options.delay_max) + " ns, " +
                     std::to_string(options.kib_time) + " ns per KiB";
  const std::pair<bool, const char*> features[] = {
      {options.slow_link, ", slow link"},
      {options.reorder, ", reorder"},
      {options.partial, ", partial"},
      {options.jitter_slot_buffers, ", jitter slot buffers"},
      {options.delay_notices, ", delay notices"},
      {options.hide_until_poll, ", hide until poll"},
  };
  for (const auto& [on, name] : features) {
    if (on) text += name;
  }
  for (const SimDeath& death : options.deaths) {
    text += ", rank " + std::to_string(death.rank) + " dies at " + std::to_string(death.at) +
            " ns (told within " + std::to_string(death.detection_max) + " ns)";
  }
  for (const SimCut& cut : options.cuts) {
    text += ", link " + std::to_string(cut.first) + "-" + std::to_string(cut.second) +
            " is cut at " + std::to_string(cut.at) + " ns";
  }
  return text;
}

}  // namespace pycoll::transport
