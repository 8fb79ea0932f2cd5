// How a thread spends its time while its operation cannot move: spin, yield, then sleep; and when a
// thread whose operation moves all the time must look up nevertheless.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pycoll::runtime {

// One thread at a time.
class Pace {
 public:
  // `crowded`: there are fewer cores than ranks, so the peer that is waited for may need this one.
  // `together`: it does, see Company. `by_wire`: nothing comes but by polls.
  explicit Pace(bool crowded, bool together = false, bool by_wire = false)
      : spins_max_(crowded || together ? kSpinsCrowded : kSpinsAlone),
        spins_per_poll_(by_wire ? kSpinsPerPollByWire : kSpinsPerPoll),
        yields_max_(crowded ? kYieldsCrowded : kYieldsAlone) {
    if (by_wire) spins_max_ = spins_max_ / kSpinsPerPoll * kSpinsPerPollByWire;
  }
  // Of a thread that waits for a wire while others compute, which may need its core: at a yield
  // they get all of their slice, milliseconds in which nothing would be sent, and who sleeps goes
  // first when something has come. Beside a computation on the same core, 46 MB over a wire of 10
  // Gb/s that take 38 ms alone take 62 ms with spins and yields, and 40 without.
  static Pace background() {
    Pace pace(true);
    pace.yields_max_ = 0;
    return pace;
  }

  // Something moved.
  void reset() {
    met_ |= switched_;
    switched_ = false;
    spins_ = yields_ = 0;
    ++moves_;
  }
  // True while spinning is still worth it; `*poll` tells when to poll the media.
  bool spin(bool* poll) {
    if (spins_ >= spins_max_) return false;
    *poll = ++spins_ % spins_per_poll_ == 0;
    return true;
  }
  // True while giving the core to others is worth it.
  bool yield() { return yields_ < yields_max_ && ++yields_ > 0; }
  // That has taken so long: another thread has run on this core, or none wanted to.
  void yielded(std::int64_t nanoseconds) { switched_ = nanoseconds >= kSwitchNanoseconds; }
  // Whether something moved right after another thread had run on this core.
  bool met() const { return met_; }
  // Around a yield a look at what has arrived will do, most of the time: others want the core, and
  // with few cores most waits end after a yield or two.
  bool hurried() const {
    return yields_ < yields_max_ && yields_ % kYieldsPerWatch != kYieldsPerWatch - 1;
  }
  // While hurried: the media are to be asked nevertheless, so that losses show.
  bool asks() const { return yields_ % kYieldsPerPoll == kYieldsPerPoll - 1; }

  // Something has moved so often since the last looked() that deadlines, peers and signals must not
  // wait any longer.
  bool overdue() const { return moves_ >= kMovesMax; }
  void looked() { moves_ = 0; }

 private:
  // With a core per rank a thread spins for about 20 us. Then it yields between its looks, since
  // the scheduler may have put the awaited peer on this very core, for some milliseconds: whom a
  // peer's packet wakes, the scheduler often puts on the peer's core, where each then waits for
  // the end of the other's slice, 4 ms and more. Where cores are few, yields take about the time
  // that a hand-off by eventfd costs (26-45 us) and some more, and spins would only keep the core
  // from the awaited peer.
  static constexpr int kSpinsAlone = 400;
  static constexpr int kSpinsCrowded = 0;
  static constexpr int kYieldsAlone = 3000;
  static constexpr int kYieldsCrowded = 200;
  static constexpr int kYieldsPerWatch = 16;
  static constexpr int kYieldsPerPoll = 4;
  static constexpr int kSpinsPerPoll = 8;
  // 1 KiB over veth: 10.3 us with 8 between two polls, 9.9 with 2.
  static constexpr int kSpinsPerPollByWire = 2;
  // A yield to nobody takes 0.3 us, one to another process 2 us and its time.
  static constexpr std::int64_t kSwitchNanoseconds = 1000;
  // One move is a few MiB at most (Execution::kRowsPerAdvance), about a millisecond.
  static constexpr int kMovesMax = 64;

  int spins_max_;
  int spins_per_poll_;
  int yields_max_;
  int spins_ = 0;
  int yields_ = 0;
  int moves_ = 0;
  bool switched_ = false;
  bool met_ = false;
};

// Whether the scheduler has put an awaited peer on this thread's core though there are enough. Then
// spinning is in its way, and every wait would last as long as both spin: 40 us and more. Yields
// let the peer run, but keep both there: the scheduler takes from a core what has waited for it for
// long, and leaves for 20 to 40 ms what has run there a moment ago. Who sleeps, however shortly, is
// put on a core that is idle, if one is.
class Company {
 public:
  // After every wait. One that was met counts as four that were not: on one core every second is,
  // on two now and then one, since any yield may take long.
  void note(const Pace& pace) {
    signs_ = pace.met() ? std::min(signs_ + 4, kSignsMax) : std::max(signs_ - 1, 0);
    if (signs_ == 0) pause_ = kPauseMin;
  }
  bool together() const { return signs_ > kSignsFew; }
  // Whether to sleep now instead of the next yield; `now` in nanoseconds. True less and less often
  // while that does not help: other threads have all other cores.
  bool leaves(std::int64_t now) {
    if (!together() || now < next_) return false;
    next_ = now + pause_;
    pause_ = std::min(2 * pause_, kPauseMax);
    return true;
  }

 private:
  static constexpr int kSignsMax = 32;
  static constexpr int kSignsFew = 8;
  // A sleep takes 60 us, by the kernel's slack for timers.
  static constexpr std::int64_t kPauseMin = 100'000;
  static constexpr std::int64_t kPauseMax = 128'000'000;
  int signs_ = 0;
  std::int64_t next_ = 0;
  std::int64_t pause_ = kPauseMin;
};

}  // namespace pycoll::runtime
