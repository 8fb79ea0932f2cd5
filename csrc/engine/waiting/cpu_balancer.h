// Spreads the ranks of a host evenly over its cores when the ranks outnumber the
// cores. The scheduler does not: a rank that waits yields, so it is ready to run
// as often as a rank that works. The scheduler may leave most ranks on one core
// for seconds, and all ranks then wait for those.
#pragma once

#include <vector>

#include "base/clock.h"
#include "transport/capabilities.h"

namespace pycoll::engine {

// The core to which `rank` should move: a core of `usable` on which at least two ranks fewer run
// than on its own. -1 if there is none, or if another rank should move first. `cores[r]` is the
// core of rank r, -1 if unknown. Ranks with the same information agree on the rank that moves: the
// highest rank of each core, from the fullest core to the emptiest.
int less_loaded_core(const std::vector<int>& cores, int rank, const std::vector<int>& usable);

// The balancer of one rank. One thread at a time.
class CpuBalancer {
 public:
  // `cores`: the number of cores on which all ranks of this host together may run. `media` outlive
  // the balancer.
  CpuBalancer(int rank, int size, int cores, std::vector<transport::CoreHints*> media);

  // States on all media that ranks share cores. Called once, before any channel is used.
  void share_cores();
  // A waiting rank calls this each time before it yields its core. Returns the core to which it
  // should move instead, or -1 to stay. Tells the peers on which core this rank runs.
  int better_core(Clock& clock);

 private:
  // Waits between two looks at the cores of peers; a look reads one cache line per peer.
  static constexpr int kWaitsPerLook = 32;
  // Time between two moves. A move is expensive, and the
  // scheduler may have reasons for its placement.
  static constexpr Nanoseconds kPause = 10'000'000;

  void look(int own);
  bool is_oversubscribed(int own) const;

  int rank_;
  int usable_;
  std::vector<transport::CoreHints*> media_;
  std::vector<int> cores_;  // by rank, as of the last look
  int waits_ = 0;
  Nanoseconds next_ = 0;
};

}  // namespace pycoll::engine
