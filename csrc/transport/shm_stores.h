// Which stores fill the rooms of a shared-memory channel: ordinary ones, or such as go past the
// caches.
//
// Room that is used again was last read by the peer, so an ordinary store has to take its line from
// the peer's cache first. Where that is quick, the peer then finds the line near. Where it is not,
// stores that write to memory, and a peer that reads from there, took 0.4 to 0.7 of the time of an
// all_reduce of 256 KiB to 32 MiB (Zen 4); where memory is far they took 1.1 to 1.9 (Granite
// Rapids). How quick it is depends on the cores on which two ranks run, and on what else the host
// of a virtual machine does, and changes while they run; a latency does not tell it (a line may
// arrive within 60 ns, and only every 15 ns one). So the filling itself is timed: a few segments of
// those that are filled in the way that is in use, and a few that are filled in the other for a
// trial. Until something is known rooms are filled past the caches: with both kinds of memory that
// was at most twice as slow, and the other way up to three times.
//
// Where ranks share cores, an ordinary fill is quick if the peer has read the room on this very
// core, but what the peer reads next may have been written on another: with 8 ranks on 2 cores of a
// Zen 4 ordinary stores took twice as long in most runs, and a quarter less in some. So receivers
// say there on which core they read: if that is this one, stores are ordinary, and only fills
// across cores are timed. (8 ranks on 2 cores of a Granite Rapids, ordinary stores only: 0.62 of
// the time at 64 KiB, 0.72 at 16 KiB, 0.85 from 256 KiB on.)
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/copy.h"
#include "transport/shm_layout.h"

namespace pycoll::transport::shm {

// Shorter segments are not worth another way than ordinary stores. (From 12 KiB on: 4 KiB took 0.87
// of the time where lines are quick, and twice the time where they are not.)
inline constexpr std::size_t kStreamedBytesMin = 2 * 1024;

inline SteadyClock usual_clock;

// How an owner settles which stores are used.
struct StoresOptions {
  std::optional<bool> streaming;  // for good, instead of by looking
  // Where ranks share cores: on which core, + 1, the peer read last. Outlives the channel.
  const std::uint64_t* reader_core = nullptr;
  Clock* clock = &usual_clock;
};

// For one channel. Counts the segments that have had room of their own. One thread at a time.
class Stores {
 public:
  explicit Stores(const StoresOptions& options)
      : settled_(options.streaming.has_value()),
        reader_core_(options.reader_core),
        clock_(options.clock),
        streaming_(options.streaming.value_or(true)) {}

  // Whether writer and reader may share a core.
  bool is_crowded() const { return reader_core_ != nullptr; }

  // Whether to make the payload of the next segment elsewhere and fill() it in, rather than in the
  // room; and to copy it rather than to lend what is in this core's cache, which costs the peer the
  // same.
  bool wants_fill(std::size_t all_bytes) const {
    return all_bytes >= kStreamedBytesMin && (is_trial() || (streaming_ && !is_near()));
  }

  // Some or all of the payload, which has so many bytes in all. True if later stores must be
  // ordered behind it by stream_fence().
  bool fill(std::size_t all_bytes, std::byte* room, const std::byte* from, std::size_t bytes) {
    if (all_bytes < kStreamedBytesMin) {
      store(room, from, bytes);
      return false;
    }
    const bool near = is_near();
    const bool streams = streaming_ && !near && !is_trial();
    streamed_any_ |= streams;
    if (streams) {
      if (is_timed(bytes)) {
        learn_streamed(bytes, timed([&] { stream_copy(room, from, bytes); }));
      } else {
        stream_copy(room, from, bytes);
      }
    } else if (is_timed(bytes) && ordinary_run_ >= kChannelDepth && !near) {
      learn(bytes, timed([&] { store(room, from, bytes); }));
    } else {
      store(room, from, bytes);
    }
    return streams;
  }

  // The segment is complete.
  void finish(std::size_t all_bytes) {
    if (all_bytes < kStreamedBytesMin) return;
    ++segment_;
    ordinary_run_ = std::exchange(streamed_any_, false) ? 0 : ordinary_run_ + 1;
  }

  // A streaming fill of `bytes` took so long.
  void learn_streamed(std::size_t bytes, Nanoseconds took) { (void)streamed_.add(bytes, took); }

  // An ordinary fill of `bytes` took so long.
  void learn(std::size_t bytes, Nanoseconds took) {
    if (settled_ || !ordinary_.add(bytes, took)) return;
    const bool slow = is_slow();
    period_ = slow == streaming_ ? std::clamp(2 * period_, kPeriodMin, kPeriodMax) : kPeriodMin;
    streaming_ = slow;
  }

 private:
  static constexpr std::size_t kTimedBytesMin = 2 * 1024;
  static constexpr std::uint64_t kTimedEvery = 8;
  // Nanoseconds for a KiB. By streaming stores it takes 28 to 40 (Zen 4, without what is under way
  // at the end) or 90 to 180 (Granite Rapids), by ordinary ones 50 to 140 where they are the right
  // ones (Granite Rapids), otherwise 90 to 430. They may take as long as streaming ones do in any
  // case.
  static constexpr Nanoseconds kSlow = 70, kQuick = 60;
  // From one trial to the next, in segments; the longer, the more trials have confirmed the choice.
  static constexpr std::uint64_t kPeriodFirst = 32, kPeriodMin = 512, kPeriodMax = 16384;

  // The last few times, in nanoseconds for a KiB.
  class Timings {
   public:
    // True if all are new since it was true last.
    bool add(std::size_t bytes, Nanoseconds took) {
      times_[known_++ % kTimes] = took * 1024 / static_cast<Nanoseconds>(bytes);
      return known_ % kTimes == 0;
    }
    // 0 while there are too few.
    Nanoseconds median() const { return sorted(kTimes / 2); }

   private:
    static constexpr std::size_t kTimes = 5;
    Nanoseconds sorted(std::size_t place) const {
      if (known_ < kTimes) return 0;
      auto times = times_;
      std::nth_element(times.begin(), times.begin() + place, times.end());
      return times[place];
    }

    std::size_t known_ = 0;
    std::array<Nanoseconds, kTimes> times_ = {};
  };

  bool is_near() const {
    return is_crowded() && !settled_ &&
           load_acquire(*reader_core_) == static_cast<std::uint64_t>(sched_getcpu()) + 1;
  }

  // Where ranks share cores nobody knows who has the lines.
  void store(std::byte* room, const std::byte* from, std::size_t bytes) const {
    is_crowded() ? copy_bytes(room, from, bytes) : claim_and_copy(room, from, bytes);
  }

  // Stores still under way count, too: the peer waits for them, and of a short piece all may be.
  // Without them streaming stores seemed quicker at 2 to 64 KiB, where they were not, and
  // all_reduce of 64 KiB took 7.8 or 14 us, by chance (2 ranks, Granite Rapids).
  template <typename Work>
  Nanoseconds timed(const Work& work) const {
    const Nanoseconds begin = clock_->now();
    work();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return clock_->now() - begin;
  }

  bool is_timed(std::size_t bytes) const {
    return !settled_ && segment_ % kTimedEvery == 0 && bytes >= kTimedBytesMin;
  }

  bool is_slow() const {
    const Nanoseconds streamed = streamed_.median();
    if (is_crowded()) return ordinary_.median() > streamed * 3 / 2;
    const Nanoseconds bound = streaming_ ? std::max(kQuick, streamed) : std::max(kSlow, streamed);
    return ordinary_.median() > bound;
  }

  // One turn of all rooms, and the segment that is timed: only a room that was filled like that
  // before costs what it would cost every time.
  bool is_trial() const {
    const std::uint64_t place = segment_ % period_;
    return !settled_ && place >= kTimedEvery - kChannelDepth && place <= kTimedEvery;
  }

  bool settled_;
  const std::uint64_t* reader_core_;
  Clock* clock_;
  bool streaming_;
  std::uint64_t segment_ = 0;       // of those that were long enough, the next one
  std::uint64_t ordinary_run_ = 0;  // so many were filled by ordinary stores, up to now
  bool streamed_any_ = false;       // of the next one
  std::uint64_t period_ = kPeriodFirst;
  Timings ordinary_;
  Timings streamed_;
};

}  // namespace pycoll::transport::shm
