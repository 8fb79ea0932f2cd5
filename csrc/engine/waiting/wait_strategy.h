// How a waiting thread spends its time: it spins, then yields, then sleeps. Also tells when a
// thread whose operation keeps moving must check other events.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pycoll::engine {

// One thread at a time.
class WaitStrategy {
 public:
  // `oversubscribed`: the host has fewer cores than ranks, so the peer may need
  // this core. `together`: the peer runs on this core, see WaitingThreads.
  // `by_wire`: segments arrive only through polls.
  explicit WaitStrategy(bool oversubscribed, bool together = false, bool by_wire = false)
      : spins_max_(oversubscribed || together ? kSpinsOversubscribed : kSpinsAlone),
        spins_per_poll_(by_wire ? kSpinsPerPollByWire : kSpinsPerPoll),
        yields_max_(oversubscribed ? kYieldsOversubscribed : kYieldsAlone) {
    if (by_wire) spins_max_ = spins_max_ / kSpinsPerPoll * kSpinsPerPollByWire;
  }
  // For a thread that waits for the network while others compute and may need its core. A yield
  // gives them a whole time slice, during which nothing is sent. A thread that sleeps is scheduled
  // first when data has arrived.
  static WaitStrategy background() {
    WaitStrategy strategy(true);
    strategy.yields_max_ = 0;
    return strategy;
  }

  // Call it when something has moved.
  void reset() {
    met_ |= switched_;
    switched_ = false;
    spins_ = yields_ = 0;
    ++moves_;
  }
  // True while spinning is worthwhile; `*poll` tells when to poll the media.
  bool spin(bool* poll) {
    if (spins_ >= spins_max_) return false;
    *poll = ++spins_ % spins_per_poll_ == 0;
    return true;
  }
  // True while yielding the core is worthwhile.
  bool yield() { return yields_ < yields_max_ && ++yields_ > 0; }
  // Call it after a yield with its duration, which
  // tells whether another thread has run on this core.
  void note_yield(std::int64_t nanoseconds) { switched_ = nanoseconds >= kSwitchNanoseconds; }
  // Whether something moved right after another thread had run on this core.
  bool met() const { return met_; }
  // Whether a look at the channels is enough around this yield. Other threads want the core, and
  // with few cores most waits end after one or two yields.
  bool is_hurried() const {
    return yields_ < yields_max_ && yields_ % kYieldsPerWatch != kYieldsPerWatch - 1;
  }
  // While is_hurried(): whether to poll all media nevertheless, so that losses are noticed.
  bool asks() const { return yields_ % kYieldsPerPoll == kYieldsPerPoll - 1; }

  // Whether so much has moved since the last note_look() that
  // deadlines, peers and signals must be checked.
  bool overdue() const { return moves_ >= kMovesMax; }
  void note_look() { moves_ = 0; }

 private:
  // With a core per rank a thread first spins. Then it yields between its looks, because the
  // scheduler may have put the peer on this core for several milliseconds. The scheduler often
  // places a thread that a packet wakes on the core of the sender; each then waits for the end of
  // the other's time slice. With few cores the yields take somewhat longer than a hand-off by
  // eventfd; spinning would only keep the core from the peer.
  static constexpr int kSpinsAlone = 400;
  static constexpr int kSpinsOversubscribed = 0;
  static constexpr int kYieldsAlone = 3000;
  static constexpr int kYieldsOversubscribed = 200;
  static constexpr int kYieldsPerWatch = 16;
  static constexpr int kYieldsPerPoll = 4;
  static constexpr int kSpinsPerPoll = 8;
  // Each poll reads from the network, so spins between two polls delay the message.
  static constexpr int kSpinsPerPollByWire = 2;
  // A yield without a waiting thread is shorter than this, a switch to another process longer.
  static constexpr std::int64_t kSwitchNanoseconds = 1000;
  // One move is a few MiB at most (Execution::kRowsPerAdvance).
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

// Detects that the scheduler has put a peer on this thread's core although there are enough
// cores. Then spinning delays the peer, and every wait lasts as long as both threads spin.
// Yields let the peer run, but keep both threads on this core: the scheduler moves a thread
// that has waited long, not one that ran a moment ago. A thread that sleeps, however
// shortly, wakes on an idle core if there is one.
class WaitingThreads {
 public:
  // Call it after every wait. A wait with met() weighs four times as much as one
  // without. On a shared core every second wait has met(); on two cores only a
  // few waits do, because any yield may take long.
  void note(const WaitStrategy& strategy) {
    signs_ = strategy.met() ? std::min(signs_ + 4, kSignsMax) : std::max(signs_ - 1, 0);
    if (signs_ == 0) pause_ = kPauseMin;
  }
  bool together() const { return signs_ > kSignsFew; }
  // Whether to sleep now instead of the next yield; `now` in nanoseconds. The intervals double
  // while that does not help, which means that other threads occupy all other cores.
  bool leaves(std::int64_t now) {
    if (!together() || now < next_) return false;
    next_ = now + pause_;
    pause_ = std::min(2 * pause_, kPauseMax);
    return true;
  }

 private:
  static constexpr int kSignsMax = 32;
  static constexpr int kSignsFew = 8;
  // Longer than a short sleep, which the kernel's timer slack prolongs.
  static constexpr std::int64_t kPauseMin = 100'000;
  static constexpr std::int64_t kPauseMax = 128'000'000;
  int signs_ = 0;
  std::int64_t next_ = 0;
  std::int64_t pause_ = kPauseMin;
};

}  // namespace pycoll::engine
