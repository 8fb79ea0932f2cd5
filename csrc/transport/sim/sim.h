// A simulated network in one thread, on a virtual clock, driven by a seed: the same calls always
// give the same events at the same times. It keeps the contract of transport.h and promises
// nothing beyond it. Within the contract it is as adverse as possible: it reads handed-over memory
// late and piece by piece, overwrites committed and released slot buffers at once, and may hide
// news until the next poll.
//
// A driver steps the ranks in turn and lets time pass when no rank can move:
//
//   SimNetwork network(SimOptions::swarm(size, seed));
//   while (!all_done()) {
//     bool moved = false;
//     for (int rank = 0; rank < size; ++rank) moved |= !network.dead(rank) && step(rank);
//     if (!moved && !network.advance()) network.advance_to(earliest_deadline);
//   }
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/transport.h"

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

class SimWorld;

// Threads: one thread for the network and all its transports together; other threads may read the
// clock only. Unlike real media, the network allocates while it runs.
class SimNetwork {
 public:
  explicit SimNetwork(SimOptions options);
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  // Returns the end of `rank`, the same object at every call. It may outlive the network; its time
  // then stands still.
  // Requires: 0 <= rank < size.
  std::shared_ptr<Transport> transport(int rank) const;
  std::shared_ptr<Clock> clock() const;

  // Moves time to the next event and executes it; false if there is none. The deaths and cuts of
  // the options are events from the start.
  bool advance();
  // Executes all events up to `time` and moves the clock there. Never moves the clock back.
  void advance_to(Nanoseconds time);
  Nanoseconds next_event_time() const;  // kForever if there is none

  // Immediate faults, in addition to those of the options. Repeating a fault has no effect, and
  // killing a closed rank has none.
  void kill(int rank, Nanoseconds detection_max = 1'000'000);
  void cut(int first, int second);
  bool dead(int rank) const;

  // A hash of the kind, time and place of every event so far, in order.
  // Equal runs have equal hashes.
  std::uint64_t trace() const;
  std::uint64_t event_count() const;
  const SimOptions& options() const;

 private:
  std::shared_ptr<SimWorld> world_;
  std::vector<std::shared_ptr<Transport>> transports_;
};

}  // namespace pycoll::transport
