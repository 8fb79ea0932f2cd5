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
#include <vector>

#include "base/clock.h"
#include "transport/sim/sim_options.h"
#include "transport/transport.h"

namespace pycoll::transport {

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
