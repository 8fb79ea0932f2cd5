// Chooses the stores that fill the slot buffers of a shared-memory channel: ordinary stores, or
// streaming stores that bypass the caches.
//
// The peer has read a reused slot buffer last, so an ordinary store first fetches the line from the
// peer's cache. If that transfer is fast, the peer then finds the data in a near cache. If it is
// slow, it is faster to write to memory and let the peer read from memory. On processors with slow
// memory the opposite holds. The speed depends on the cores on which the two ranks run and on other
// load of the physical host, and changes while the ranks run. A latency does not predict it,
// because lines may arrive quickly but at a low rate.
//
// So each channel times its own fills: some segments that use the chosen stores, and a few trial
// segments that use the other stores. Until a result is known it uses streaming stores, because
// their worst case is better than that of ordinary stores.
//
// With shared cores, an ordinary fill is fast if the peer has read the buffer on this same core,
// but the data that the peer reads next may have been written on another core. Receivers therefore
// publish the core on which they read. A fill for a reader on this core uses ordinary stores and is
// not timed; only fills across cores are timed.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/copy.h"
#include "transport/shm/shm_layout.h"

namespace pycoll::transport::shm {

// Shorter segments always use ordinary stores, because the choice gains too little.
inline constexpr std::size_t kStreamedBytesMin = 2 * 1024;

inline SteadyClock usual_clock;

// How the owner of a channel determines its stores.
struct StoresOptions {
  std::optional<bool> streaming;  // true or false: fixed; without a value: decided by timing
  // With shared cores: the core on which the peer read last, + 1; otherwise
  // nullptr. Outlives the channel.
  const std::uint64_t* reader_core = nullptr;
  Clock* clock = &usual_clock;
};

// For one channel. Counts the segments that have used a slot buffer. One thread at a time.
class Stores {
 public:
  explicit Stores(const StoresOptions& options)
      : decided_(options.streaming.has_value()),
        reader_core_(options.reader_core),
        clock_(options.clock),
        streaming_(options.streaming.value_or(true)) {}

  // Whether writer and reader may share a core.
  bool is_oversubscribed() const { return reader_core_ != nullptr; }

  // Whether the caller should make the payload of the next segment elsewhere and then fill() it in,
  // instead of making it in the slot buffer. Also whether to copy data in this core's cache instead
  // of exposing it, because a zero-copy read would take the peer as long.
  bool wants_fill(std::size_t all_bytes) const {
    return all_bytes >= kStreamedBytesMin && (is_trial() || (streaming_ && !is_near()));
  }

  // Copies a part of a payload that has `all_bytes` in total, or all of it. True if stream_fence()
  // must precede later stores.
  bool fill(std::size_t all_bytes, std::byte* slot_buffer, const std::byte* from,
            std::size_t bytes) {
    if (all_bytes < kStreamedBytesMin) {
      store(slot_buffer, from, bytes);
      return false;
    }
    const bool near = is_near();
    const bool streams = streaming_ && !near && !is_trial();
    streamed_any_ |= streams;
    if (streams) {
      if (is_timed(bytes)) {
        learn_streamed(bytes, timed([&] { stream_copy(slot_buffer, from, bytes); }));
      } else {
        stream_copy(slot_buffer, from, bytes);
      }
    } else if (is_timed(bytes) && ordinary_run_ >= kChannelDepth && !near) {
      learn(bytes, timed([&] { store(slot_buffer, from, bytes); }));
    } else {
      store(slot_buffer, from, bytes);
    }
    return streams;
  }

  // Ends the segment.
  void finish(std::size_t all_bytes) {
    if (all_bytes < kStreamedBytesMin) return;
    ++segment_;
    ordinary_run_ = std::exchange(streamed_any_, false) ? 0 : ordinary_run_ + 1;
  }

  // Records the time of a streaming fill of `bytes`.
  void learn_streamed(std::size_t bytes, Nanoseconds took) { (void)streamed_.add(bytes, took); }

  // Records the time of an ordinary fill of `bytes`, and chooses the stores anew from time to time.
  void learn(std::size_t bytes, Nanoseconds took) {
    if (decided_ || !ordinary_.add(bytes, took)) return;
    const bool slow = is_slow();
    period_ = slow == streaming_ ? std::clamp(2 * period_, kPeriodMin, kPeriodMax) : kPeriodMin;
    streaming_ = slow;
  }

 private:
  static constexpr std::size_t kTimedBytesMin = 2 * 1024;
  static constexpr std::uint64_t kTimedEvery = 8;
  // Bounds for ordinary fills, in nanoseconds per KiB: above kSlow the channel changes to streaming
  // stores, and at most at kQuick it changes back. An ordinary fill may in any case take as long as
  // a streaming one.
  static constexpr Nanoseconds kSlow = 70, kQuick = 60;
  // Segments from one trial to the next. The period doubles whenever a trial confirms the choice.
  static constexpr std::uint64_t kPeriodFirst = 32, kPeriodMin = 512, kPeriodMax = 16384;

  // The most recent timings, in nanoseconds per KiB.
  class Timings {
   public:
    // True whenever all kTimes entries have been replaced.
    bool add(std::size_t bytes, Nanoseconds took) {
      times_[known_++ % kTimes] = took * 1024 / static_cast<Nanoseconds>(bytes);
      return known_ % kTimes == 0;
    }
    // 0 while there are fewer than kTimes entries.
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
    return is_oversubscribed() && !decided_ &&
           load_acquire(*reader_core_) == static_cast<std::uint64_t>(sched_getcpu()) + 1;
  }

  // With shared cores it is unknown which core's cache holds the lines, so nothing is prefetched.
  void store(std::byte* slot_buffer, const std::byte* from, std::size_t bytes) const {
    is_oversubscribed() ? copy_bytes(slot_buffer, from, bytes)
                        : claim_and_copy(slot_buffer, from, bytes);
  }

  // The time includes stores that are still in flight, because the peer waits for them, and all
  // stores of a short fill may be in flight. Without them streaming stores would wrongly seem fast.
  template <typename Work>
  Nanoseconds timed(const Work& work) const {
    const Nanoseconds begin = clock_->now();
    work();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return clock_->now() - begin;
  }

  bool is_timed(std::size_t bytes) const {
    return !decided_ && segment_ % kTimedEvery == 0 && bytes >= kTimedBytesMin;
  }

  bool is_slow() const {
    const Nanoseconds streamed = streamed_.median();
    if (is_oversubscribed()) return ordinary_.median() > streamed * 3 / 2;
    const Nanoseconds bound = streaming_ ? std::max(kQuick, streamed) : std::max(kSlow, streamed);
    return ordinary_.median() > bound;
  }

  // A trial fills every slot buffer once and then times one more segment: only a buffer whose last
  // fill used the same stores shows the lasting cost.
  bool is_trial() const {
    const std::uint64_t place = segment_ % period_;
    return !decided_ && place >= kTimedEvery - kChannelDepth && place <= kTimedEvery;
  }

  bool decided_;
  const std::uint64_t* reader_core_;
  Clock* clock_;
  bool streaming_;
  std::uint64_t segment_ = 0;       // number of the next segment of at least kStreamedBytesMin
  std::uint64_t ordinary_run_ = 0;  // segments in a row, up to now, without streaming stores
  bool streamed_any_ = false;       // the current segment has used streaming stores
  std::uint64_t period_ = kPeriodFirst;
  Timings ordinary_;
  Timings streamed_;
};

}  // namespace pycoll::transport::shm
