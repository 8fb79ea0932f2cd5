// How a thread spends its time while its operation cannot move: spin, yield, then sleep; and when a
// thread whose operation moves all the time must look up nevertheless.
#pragma once

namespace pycoll::runtime {

// One thread at a time.
class Pace {
 public:
  // `crowded`: there are fewer cores than ranks, so the peer that is waited for may need this one.
  explicit Pace(bool crowded)
      : spins_max_(crowded ? kSpinsCrowded : kSpinsAlone),
        yields_max_(crowded ? kYieldsCrowded : kYieldsAlone) {}

  // Something moved.
  void reset() {
    spins_ = yields_ = 0;
    ++moves_;
  }
  // True while spinning is still worth it; `*poll` tells when to poll the media.
  bool spin(bool* poll) {
    if (spins_ >= spins_max_) return false;
    *poll = ++spins_ % kSpinsPerPoll == 0;
    return true;
  }
  // True while giving the core to others is worth it.
  bool yield() { return yields_ < yields_max_ && ++yields_ > 0; }
  // Between two yields a look at the media will do, most of the time: others want the core.
  bool hurried() const {
    return yields_ != 0 && yields_ < yields_max_ && yields_ % kYieldsPerWatch != 0;
  }

  // Something has moved so often since the last looked() that deadlines, peers and signals must not
  // wait any longer.
  bool overdue() const { return moves_ >= kMovesMax; }
  void looked() { moves_ = 0; }

 private:
  // With a core per rank a thread spins for about 20 us. Then it yields between its looks, since
  // the scheduler may have put the awaited peer on this very core, for some milliseconds: whom a
  // peer's packet wakes, the scheduler often puts on the peer's core, where each then waits for
  // the end of the other's slice, 4 ms and more. Where cores are few, yields and spins take about
  // the time that a hand-off by eventfd costs (26-45 us) and some more.
  static constexpr int kSpinsAlone = 400;
  static constexpr int kSpinsCrowded = 4;
  static constexpr int kYieldsAlone = 3000;
  static constexpr int kYieldsCrowded = 200;
  static constexpr int kYieldsPerWatch = 16;
  static constexpr int kSpinsPerPoll = 8;
  // One move is a few MiB at most (Execution::kRowsPerAdvance), about a millisecond.
  static constexpr int kMovesMax = 64;

  int spins_max_;
  int yields_max_;
  int spins_ = 0;
  int yields_ = 0;
  int moves_ = 0;
};

}  // namespace pycoll::runtime
