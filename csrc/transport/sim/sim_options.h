// The events of a simulated network: delays, disorder, cuts and deaths.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"

namespace pycoll::transport {

// Breaks the link between two ranks: both see kLost, and everything in flight is lost.
struct SimCut {
  int first = 0;
  int second = 1;
  Nanoseconds at = 0;
};

// A rank dies: everything that it has in flight is lost, its own calls have no effect from then on,
// and each peer sees kLost within `detection_max`.
struct SimDeath {
  int rank = 0;
  Nanoseconds at = 0;
  Nanoseconds detection_max = 1'000'000;
};

// Defaults: a plain network with constant delay that keeps the order between two ranks.
struct SimOptions {
  int size = 2;
  std::uint64_t seed = 1;
  // Each direction of each link draws its own range of delays between these bounds.
  Nanoseconds delay_min = 1'000;
  Nanoseconds delay_max = 1'000;
  Nanoseconds kib_time = 100;        // added per KiB of payload
  bool slow_link = false;            // one direction of one link is a hundred times slower
  bool reorder = false;              // channels of a link overtake each other
  bool partial = false;              // segments arrive in pieces; visible once whole
  bool jitter_slot_buffers = false;  // released slots return late, out of order with other traffic
  bool delay_notices = false;        // notices travel late and out of order; the newest wins
  bool hide_until_poll = false;      // segments, free slots and notices show only after poll()
  std::vector<SimCut> cuts;
  std::vector<SimDeath> deaths;

  // A random subset of the adverse features with random delays, but without cuts and deaths.
  static SimOptions swarm(int size, std::uint64_t seed);
  // As swarm(), with at least one cut or death before `horizon`; early and late times are equally
  // likely by magnitude.
  // Requires: size >= 2.
  static SimOptions swarm_with_faults(int size, std::uint64_t seed, Nanoseconds horizon);
};

// The options as text for logs: "size 4, seed 77: delay ..., reorder, partial, rank 2 dies at ...".
std::string to_text(const SimOptions& options);

}  // namespace pycoll::transport
