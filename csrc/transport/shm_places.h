// Which stores put a segment where its receiver wants it, in memory of the receiver's own: ordinary
// ones, or such as go past the caches.
//
// Past them the receiver reads its result from memory, and so does the sender if it reads there
// again, as it does in the next all_reduce in place. By ordinary stores the sender takes the lines
// first and keeps them. What is less depends on the processor, on how much fits its caches, and on
// whether the receiver has touched the memory since: with 2 ranks, ordinary stores took 0.25 of the
// time of an all_reduce of 64 KiB to 1 MiB and 0.45 of 4 to 32 MiB (Granite Rapids, 480 MiB of
// third-level cache), where long streamed ones took 0.67 on Zen 4. So both are timed: one segment
// of an operation now and then, for each size of the receiver's memory. To say what they would cost
// every time, the other stores have to fill the same place a few operations in a row; and it is one
// from the middle, since operations take segments in turns from either end, so that the outer ones
// were touched either a moment or two operations ago. Until something is known, stores go past the
// caches.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "base/clock.h"
#include "base/copy.h"
#include "transport/shm_stores.h"

namespace pycoll::transport::shm {

// For one channel. One thread at a time.
class Places {
 public:
  explicit Places(const StoresOptions& options)
      : settled_(options.streaming.has_value()),
        crowded_(options.reader_core != nullptr),
        clock_(options.clock) {
    for (Habit& habit : habits_) habit.streaming = options.streaming.value_or(true);
  }

  // What is put from now on is segment `segment` of its channel (counted from 0, they only grow), a
  // part of operation `sequence`, so far into memory of which the receiver has offered so many
  // bytes. To be called again for the same segment does nothing.
  void aim(std::uint64_t segment, std::uint64_t sequence, std::uint64_t offset,
           std::size_t offered_bytes) {
    if (segment + 1 == aimed_) return;
    aimed_ = segment + 1;
    took_ = 0;
    timed_bytes_ = 0;
    habit_ = &habits_[kind_of(offered_bytes)];
    if (habit_->sequence != sequence) enter(*habit_, sequence);
    const bool middle = habit_->segments++ == habit_->middle;
    if (habit_->turn == kUsualTurn && middle) habit_->place = offset;
    aims_there_ = habit_->turn == kUsualTurn ? middle : habit_->place == offset;
  }

  // Some or all of the segment. True if later stores must be ordered behind it by stream_fence().
  bool put(std::byte* to, const std::byte* from, std::size_t bytes) {
    const bool watched = is_watched();
    const bool streams = habit_->streaming != (watched && habit_->turn != kUsualTurn);
    if (!watched || bytes < kTimedBytesMin) return store(streams, to, from, bytes);
    const Nanoseconds begin = clock_->now();
    (void)store(streams, to, from, bytes);
    took_ += clock_->now() - begin;
    timed_bytes_ += bytes;
    return streams;
  }

  // The segment is complete.
  void finish() {
    if (timed_bytes_ == 0) return;
    const Nanoseconds each = took_ * kUnitBytes / static_cast<Nanoseconds>(timed_bytes_);
    timed_bytes_ = 0;
    learn(each);
  }

  // The segment, or as much of it as kUnitBytes, took so long.
  void learn(Nanoseconds took) {
    if (!is_watched()) return;
    if (habit_->turn == kUsualTurn) habit_->usual = took;
    if (habit_->turn == kTrialTurns - 1) compare(*habit_, took);
  }

 private:
  // By size of the receiver's memory: below 256 KiB, 1 MiB, ... 64 MiB, and longer.
  static constexpr std::size_t kKinds = 6;
  static constexpr int kShortestBits = 18;
  static constexpr std::size_t kTimedBytesMin = 4 * 1024;
  // Times are of so many bytes.
  static constexpr Nanoseconds kUnitBytes = 64 * 1024;
  // Operations: one that is timed as it is, and some in which the other stores are used, of which
  // the last one is timed. It sweeps as the first does.
  static constexpr std::uint64_t kUsualTurn = 0, kTrialTurns = 5;
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};
  static constexpr std::size_t kTimes = 3;
  // From one trial to the next, in operations; the longer, the more have confirmed the choice.
  static constexpr std::uint64_t kPeriodFirst = kTrialTurns, kPeriodMin = 64, kPeriodMax = 1024;
  // What ordinary stores may take, in hundredths of what streaming ones take. A little more is
  // worthwhile, since lines are then near for whoever reads them next; unless ranks move between
  // cores, and the lines stay where they are.
  static constexpr Nanoseconds kQuick = 110, kSlow = 140;
  static constexpr Nanoseconds kQuickCrowded = 50, kSlowCrowded = 80;

  struct Habit {
    bool streaming = true;
    std::uint64_t sequence = ~std::uint64_t{0};  // of the operation that was seen last
    std::uint64_t segments = 0;                  // that it has put
    std::uint64_t middle = 0;                    // of the segments of the one before
    std::uint64_t place = kNowhere;              // that is watched
    std::uint64_t turn = kPeriodFirst - 1;
    std::uint64_t period = kPeriodFirst;
    Nanoseconds usual = 0;
    std::size_t known = 0;
    std::array<Nanoseconds, kTimes> shares = {};
  };

  static std::size_t kind_of(std::size_t bytes) {
    const int bits = static_cast<int>(std::bit_width(bytes));
    if (bits <= kShortestBits) return 0;
    return std::min(kKinds - 1, static_cast<std::size_t>(bits - kShortestBits + 1) / 2);
  }

  static void enter(Habit& habit, std::uint64_t sequence) {
    habit.sequence = sequence;
    habit.turn = (habit.turn + 1) % habit.period;
    habit.middle = habit.segments / 2;
    habit.segments = 0;
    if (habit.turn == kUsualTurn) habit.place = kNowhere;
  }

  bool is_watched() const { return aims_there_ && !settled_ && habit_->turn < kTrialTurns; }

  static bool store(bool streams, std::byte* to, const std::byte* from, std::size_t bytes) {
    streams ? stream_copy(to, from, bytes) : copy_bytes(to, from, bytes);
    return streams;
  }

  bool is_slow(const Habit& habit, Nanoseconds share) const {
    if (habit.streaming) return share > (crowded_ ? kQuickCrowded : kQuick);
    return share > (crowded_ ? kSlowCrowded : kSlow);
  }

  void compare(Habit& habit, Nanoseconds other) const {
    const Nanoseconds ordinary = habit.streaming ? other : habit.usual;
    const Nanoseconds streamed = std::max<Nanoseconds>(habit.streaming ? habit.usual : other, 1);
    habit.shares[habit.known++] = ordinary * 100 / streamed;
    if (habit.known < kTimes) {
      // Long operations are few: the first trial counts until there are enough.
      if (habit.period == kPeriodFirst) habit.streaming = is_slow(habit, habit.shares[0]);
      return;
    }
    std::nth_element(habit.shares.begin(), habit.shares.begin() + kTimes / 2, habit.shares.end());
    const bool slow = is_slow(habit, habit.shares[kTimes / 2]);
    habit.period =
        slow == habit.streaming ? std::clamp(2 * habit.period, kPeriodMin, kPeriodMax) : kPeriodMin;
    habit.streaming = slow;
    habit.known = 0;
  }

  bool settled_;
  bool crowded_;
  Clock* clock_;
  std::array<Habit, kKinds> habits_ = {};
  Habit* habit_ = habits_.data();
  std::uint64_t aimed_ = 0;  // the segment's number + 1
  bool aims_there_ = false;  // at the place that is watched
  Nanoseconds took_ = 0;
  std::size_t timed_bytes_ = 0;
};

}  // namespace pycoll::transport::shm
