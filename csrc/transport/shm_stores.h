// Which stores fill the rooms of a shared-memory channel: ordinary ones, or such as go past the
// caches.
//
// Room that is used again was last read by the peer, so an ordinary store has to take its line from
// the peer's cache first. Where that is quick, the peer then finds the line near. Where it is not,
// stores that write to memory, and a peer that reads from there, took 0.4 to 0.7 of the time of an
// all_reduce of 256 KiB to 32 MiB. How quick it is depends on the cores on which two ranks run, and
// on what else the host of a virtual machine does, and changes while they run; a latency does not
// tell it (a line may arrive within 60 ns, and only every 15 ns one). So the filling itself is
// timed: a few segments of those that are filled by ordinary stores, and where there are none, of
// some that are filled like that for a trial. Until something is known rooms are filled past the
// caches: that was never slower by more than a few percent, and the other way up to three times.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/copy.h"
#include "transport/shm_layout.h"

namespace pycoll::transport::shm {

// For one channel; segments are named by their numbers, which only grow, and have so many bytes in
// all. One thread at a time.
class Stores {
 public:
  // `streaming`: settled for good, instead of by looking.
  explicit Stores(std::optional<bool> streaming)
      : settled_(streaming.has_value()), streaming_(streaming.value_or(true)) {}

  // Whether to make the payload of `segment` elsewhere and fill() it in, rather than in the room;
  // and to copy it rather than to lend what is in this core's cache, which costs the peer the same.
  bool wants_fill(std::uint64_t segment, std::size_t all_bytes) const {
    return all_bytes >= kStreamedBytesMin && (streaming_ || is_trial(segment));
  }

  // Some or all of the payload. True if later stores must be ordered behind it by stream_fence().
  bool fill(std::uint64_t segment, std::size_t all_bytes, std::byte* room, const std::byte* from,
            std::size_t bytes) {
    if (all_bytes < kStreamedBytesMin) {
      copy_bytes(room, from, bytes);
      return false;
    }
    if (streaming_ && !is_trial(segment)) {
      stream_copy(room, from, bytes);
      return true;
    }
    if (segment > last_ + 1) first_ = segment;
    last_ = segment;
    // Only a room that was filled like that before costs what it would cost every time.
    if (segment % kTimedEvery != 0 || segment - first_ < kChannelDepth || bytes < kTimedBytesMin) {
      copy_bytes(room, from, bytes);
      return false;
    }
    SteadyClock clock;
    const Nanoseconds begin = clock.now();
    copy_bytes(room, from, bytes);
    learn(bytes, clock.now() - begin);
    return false;
  }

  // An ordinary fill of `bytes` took so long.
  void learn(std::size_t bytes, Nanoseconds took) {
    if (settled_) return;
    times_[known_++ % kTimes] = took * 1024 / static_cast<Nanoseconds>(bytes);
    if (known_ < kTimes) return;
    auto sorted = times_;
    std::nth_element(sorted.begin(), sorted.begin() + kTimes / 2, sorted.end());
    const bool slow = sorted[kTimes / 2] > (streaming_ ? kQuick : kSlow);
    period_ = slow == streaming_ ? std::clamp(2 * period_, kPeriodMin, kPeriodMax) : kPeriodMin;
    streaming_ = slow;
    known_ = 0;
  }

 private:
  // Of a segment; shorter ones are not worth another way. (From 12 KiB on: 4 KiB took 0.87 of the
  // time where lines are quick, and twice the time where they are not.)
  static constexpr std::size_t kStreamedBytesMin = 2 * 1024;
  static constexpr std::size_t kTimedBytesMin = 4 * 1024;
  static constexpr std::uint64_t kTimedEvery = 8;
  static constexpr std::size_t kTimes = 5;
  // Nanoseconds for a KiB. By streaming stores it takes 28 to 40, by ordinary ones 90 to 430 where
  // they are the wrong ones (Zen 4).
  static constexpr Nanoseconds kSlow = 70, kQuick = 60;
  // From one trial to the next, in segments; the longer, the more trials have confirmed the choice.
  static constexpr std::uint64_t kPeriodFirst = 32, kPeriodMin = 512, kPeriodMax = 16384;

  // One turn of all rooms, and the segment that is timed.
  bool is_trial(std::uint64_t segment) const {
    const std::uint64_t place = segment % period_;
    return !settled_ && place >= kTimedEvery - kChannelDepth && place <= kTimedEvery;
  }

  bool settled_;
  bool streaming_;
  // Since first_ all segments up to last_ were filled by ordinary stores.
  std::uint64_t first_ = 0;
  std::uint64_t last_ = 0;
  std::uint64_t period_ = kPeriodFirst;
  std::size_t known_ = 0;
  std::array<Nanoseconds, kTimes> times_ = {};
};

}  // namespace pycoll::transport::shm
