// A network in one thread, on a virtual clock, decided by a seed: the same calls give the same
// events at the same times, always. It keeps the contract of transport.h and nothing beyond it, and
// is as awkward as that allows: memory that was handed over is read late and piece by piece, room
// that was committed or released is overwritten at once, and news may stay hidden until the next
// poll.
//
// A driver steps the ranks in turn and lets time pass when none of them can move:
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

// The link between two ranks breaks: both see kLost, and what was under way is gone.
struct SimCut {
  int first = 0;
  int second = 1;
  Nanoseconds at = 0;
};

// A rank vanishes: what it had under way is gone, its own calls do nothing from then on, and each
// peer sees kLost some time within `detection_max` later.
struct SimDeath {
  int rank = 0;
  Nanoseconds at = 0;
  Nanoseconds detection_max = 1'000'000;
};

// By default a plain network: constant delay, everything between two ranks in order.
struct SimOptions {
  int size = 2;
  std::uint64_t seed = 1;
  // Each direction of each link draws its own range of delays within these.
  Nanoseconds delay_min = 1'000;
  Nanoseconds delay_max = 1'000;
  Nanoseconds kib_time = 100;    // added per KiB of payload
  bool slow_link = false;        // one direction of one link is a hundred times slower
  bool reorder = false;          // channels of a link overtake each other
  bool partial = false;          // segments arrive in pieces; visible once whole
  bool jitter_rooms = false;     // released room returns late, on its own way
  bool delay_notices = false;    // notices travel late and overtake each other; the newest wins
  bool hide_until_poll = false;  // segments, room and notices show only after the owner's poll()
  std::vector<SimCut> cuts;
  std::vector<SimDeath> deaths;

  // A random subset of the awkward features with random delays, but no cut and no death.
  static SimOptions swarm(int size, std::uint64_t seed);
  // The same, with at least one cut or death before `horizon`; early ones as likely as late ones.
  // Requires: size >= 2.
  static SimOptions swarm_with_faults(int size, std::uint64_t seed, Nanoseconds horizon);
};

// "size 4, seed 77: delay 100..2000 ns, reorder, partial, rank 2 dies at 1200 ns"
std::string to_text(const SimOptions& options);

class SimWorld;

// Threads: one for the network and all its transports together; only the clock may be read from
// others. Unlike real media it allocates whenever events need room.
class SimNetwork {
 public:
  explicit SimNetwork(SimOptions options);
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  // The end of `rank`, always the same one. It may outlive the network; its time then stands still.
  // Requires: 0 <= rank < size.
  std::shared_ptr<Transport> transport(int rank) const;
  std::shared_ptr<Clock> clock() const;

  // Moves time to the next event and lets it happen; false if none is left. A death or cut of the
  // options is an event from the start.
  bool advance();
  // Lets everything up to `time` happen and moves the clock there. Never moves it back.
  void advance_to(Nanoseconds time);
  Nanoseconds next_event_time() const;  // kForever if there is none

  // Faults now, beside those of the options. Repeating one, or killing a closed rank, does nothing.
  void kill(int rank, Nanoseconds detection_max = 1'000'000);
  void cut(int first, int second);
  bool dead(int rank) const;

  // A hash of every event so far: kind, time, place, in order. Equal runs have equal hashes.
  std::uint64_t trace() const;
  std::uint64_t event_count() const;
  const SimOptions& options() const;

 private:
  std::shared_ptr<SimWorld> world_;
  std::vector<std::shared_ptr<Transport>> transports_;
};

}  // namespace pycoll::transport
