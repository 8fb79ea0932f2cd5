// Where the ranks of a host outnumber its cores: keeps them evenly on the cores. The scheduler sees
// no need to: who waits yields, and so is ready to run as much as who works. It leaves 5 of 8 ranks
// on one of 2 cores for seconds, whose turns all 8 then wait for. All_reduce of 64 B took 25 us
// like that, and 14 with 4 on each.
#pragma once

#include <memory>
#include <vector>

#include "base/clock.h"
#include "transport/transport.h"

namespace pycoll::runtime {

// Where `rank` had better run: a core of `usable` on which at least two ranks fewer run than on its
// own; -1 if there is none, or if another rank is the one to go. `cores[r]` is where rank r runs,
// -1 if that is unknown. Ranks that know the same go as one: of each core the highest, from the
// fullest core to the emptiest.
int roomier_core(const std::vector<int>& cores, int rank, const std::vector<int>& usable);

// Of one rank. One thread at a time.
class Spread {
 public:
  using Media = std::vector<std::shared_ptr<transport::Transport>>;

  // The ranks of this host may run on so many `cores`, all together.
  Spread(int rank, int size, int cores);

  // For a rank that waits, before each time that it gives its core to others: the core that it had
  // better move to instead, -1 to stay. Tells peers on `media` where this rank runs.
  int better_core(const Media& media, Clock& clock);

 private:
  // Between two looks at where peers are, each of which reads a line per peer: 0.1 to 0.5 ms, with
  // turns of 2 to 5 us.
  static constexpr int kWaitsPerLook = 32;
  // Between two moves: each takes some tens of microseconds, and the scheduler may have its
  // reasons.
  static constexpr Nanoseconds kPause = 10'000'000;

  void look(const Media& media, int own);
  bool crowded(int own) const;

  int rank_;
  int usable_;
  std::vector<int> cores_;  // by rank, as of the last look
  int waits_ = 0;
  Nanoseconds next_ = 0;
};

}  // namespace pycoll::runtime
