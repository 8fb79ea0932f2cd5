// Chooses the stores for direct writes into a write window: ordinary stores, or streaming stores
// that bypass the caches.
//
// After streaming stores the receiver reads its result from memory, and so does the sender if it
// reads that memory again, as the next all_reduce in place does. With ordinary stores the sender
// first fetches the lines and then keeps them in its cache. The faster way depends on the
// processor, on the size of its caches, and on whether the receiver has touched the memory since.
//
// So each channel times both for every size class of write windows: one segment of an operation,
// now and then. A trial measures the lasting cost only if the other stores have filled the same
// place in several operations in a row. The timed segment is one from the middle of an operation:
// operations traverse segments in alternating order, so the outer segments were touched either a
// moment ago or two operations ago. Until a result is known the channel uses streaming stores.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "base/clock.h"
#include "base/copy.h"
#include "transport/shm/shm_stores.h"

namespace pycoll::transport::shm {

// For one channel. One thread at a time.
class Places {
 public:
  explicit Places(const StoresOptions& options)
      : decided_(options.streaming.has_value()),
        oversubscribed_(options.reader_core != nullptr),
        clock_(options.clock) {
    for (SizeClass& state : classes_) state.streaming = options.streaming.value_or(true);
  }

  // Directs the following put() calls to segment number `segment` of the channel (from 0,
  // ascending). It belongs to operation `sequence` and starts at `offset` in a write window of
  // `offered_bytes`. A second call for the same segment has no effect.
  void aim(std::uint64_t segment, std::uint64_t sequence, std::uint64_t offset,
           std::size_t offered_bytes) {
    if (segment + 1 == aimed_) return;
    aimed_ = segment + 1;
    took_ = 0;
    timed_bytes_ = 0;
    class_ = &classes_[kind_of(offered_bytes)];
    if (class_->sequence != sequence) enter(*class_, sequence);
    const bool middle = class_->segments++ == class_->middle;
    if (class_->phase == kBaselinePhase && middle) class_->place = offset;
    aims_at_watched_ = class_->phase == kBaselinePhase ? middle : class_->place == offset;
  }

  // Writes a part of the segment, or all of it. True if stream_fence() must precede later stores.
  bool put(std::byte* to, const std::byte* from, std::size_t bytes) {
    const bool watched = is_watched();
    const bool streams = class_->streaming != (watched && class_->phase != kBaselinePhase);
    if (!watched || bytes < kTimedBytesMin) return store(streams, to, from, bytes);
    const Nanoseconds begin = clock_->now();
    (void)store(streams, to, from, bytes);
    took_ += clock_->now() - begin;
    timed_bytes_ += bytes;
    return streams;
  }

  // Ends the segment.
  void finish() {
    if (timed_bytes_ == 0) return;
    const Nanoseconds each = took_ * kUnitBytes / static_cast<Nanoseconds>(timed_bytes_);
    timed_bytes_ = 0;
    learn(each);
  }

  // Records a timing of the segment, scaled to kUnitBytes.
  void learn(Nanoseconds took) {
    if (!is_watched()) return;
    if (class_->phase == kBaselinePhase) class_->usual = took;
    if (class_->phase == kTrialPhases - 1) compare(*class_, took);
  }

 private:
  // Size classes of write windows: below 256 KiB, below 1 MiB, ... below 64 MiB, and longer.
  static constexpr std::size_t kKinds = 6;
  static constexpr int kShortestBits = 18;
  static constexpr std::size_t kTimedBytesMin = 4 * 1024;
  // Timings are scaled to this number of bytes.
  static constexpr Nanoseconds kUnitBytes = 64 * 1024;
  // A trial spans kTrialPhases operations. Phase kBaselinePhase times the stores in use; the other
  // phases use the other stores, and the last of them is timed. The first and the last operation
  // have the same traversal order.
  static constexpr std::uint64_t kBaselinePhase = 0, kTrialPhases = 5;
  static constexpr std::uint64_t kNoPlace = ~std::uint64_t{0};
  static constexpr std::size_t kTimes = 3;
  // Operations from one trial to the next. The period doubles whenever trials confirm the choice.
  static constexpr std::uint64_t kPeriodFirst = kTrialPhases, kPeriodMin = 64, kPeriodMax = 1024;
  // Bounds for ordinary stores, in percent of the time of streaming stores. They exceed 100 because
  // ordinary stores leave the lines in a near cache for the next reader. They are below 100 with
  // shared cores, because ranks then move between cores and the lines stay behind.
  static constexpr Nanoseconds kQuick = 110, kSlow = 140;
  static constexpr Nanoseconds kQuickOversubscribed = 50, kSlowOversubscribed = 80;

  struct SizeClass {
    bool streaming = true;
    std::uint64_t sequence = ~std::uint64_t{0};  // of the operation seen last
    std::uint64_t segments = 0;                  // that this operation has put
    std::uint64_t middle = 0;                    // half the segments of the operation before it
    std::uint64_t place = kNoPlace;              // offset of the timed segment
    std::uint64_t phase = kPeriodFirst - 1;
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

  static void enter(SizeClass& state, std::uint64_t sequence) {
    state.sequence = sequence;
    state.phase = (state.phase + 1) % state.period;
    state.middle = state.segments / 2;
    state.segments = 0;
    if (state.phase == kBaselinePhase) state.place = kNoPlace;
  }

  bool is_watched() const { return aims_at_watched_ && !decided_ && class_->phase < kTrialPhases; }

  static bool store(bool streams, std::byte* to, const std::byte* from, std::size_t bytes) {
    streams ? stream_copy(to, from, bytes) : copy_bytes(to, from, bytes);
    return streams;
  }

  bool is_slow(const SizeClass& state, Nanoseconds share) const {
    if (state.streaming) return share > (oversubscribed_ ? kQuickOversubscribed : kQuick);
    return share > (oversubscribed_ ? kSlowOversubscribed : kSlow);
  }

  void compare(SizeClass& state, Nanoseconds other) const {
    const Nanoseconds ordinary = state.streaming ? other : state.usual;
    const Nanoseconds streamed = std::max<Nanoseconds>(state.streaming ? state.usual : other, 1);
    state.shares[state.known++] = ordinary * 100 / streamed;
    if (state.known < kTimes) {
      // Long operations are rare, so the first trial decides until there are kTimes of them.
      if (state.period == kPeriodFirst) state.streaming = is_slow(state, state.shares[0]);
      return;
    }
    std::nth_element(state.shares.begin(), state.shares.begin() + kTimes / 2, state.shares.end());
    const bool slow = is_slow(state, state.shares[kTimes / 2]);
    state.period =
        slow == state.streaming ? std::clamp(2 * state.period, kPeriodMin, kPeriodMax) : kPeriodMin;
    state.streaming = slow;
    state.known = 0;
  }

  bool decided_;
  bool oversubscribed_;
  Clock* clock_;
  std::array<SizeClass, kKinds> classes_ = {};
  SizeClass* class_ = classes_.data();
  std::uint64_t aimed_ = 0;       // the segment's number + 1
  bool aims_at_watched_ = false;  // the segment is the one to be timed
  Nanoseconds took_ = 0;
  std::size_t timed_bytes_ = 0;
};

}  // namespace pycoll::transport::shm
