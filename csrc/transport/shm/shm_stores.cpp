#include "transport/shm/shm_stores.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "base/cores.h"

namespace pycoll::transport::shm {
namespace {

constexpr std::size_t kBuffers = kChannelDepth;
// A round after one with other stores is not timed: only buffers that the same stores have filled
// before, and that the peer has read since, show the lasting cost.
constexpr int kRoundsInARow = 3;
// So many timed rounds of each kind, the shortest of which counts, are enough.
constexpr int kRoundsEnough = 12;
// Waits longer than this number of polls give the core away: the other thread may need it.
constexpr int kPollsMax = 4096;

// The buffers that one thread fills and the other reads, and its progress.
struct Side {
  alignas(kLinePair) std::byte slots[kBuffers][kSegmentBytesMax + kLinePair] = {};
  alignas(kLinePair) std::byte own[kBuffers][kSegmentBytesMax + kLinePair] = {};
  alignas(kLinePair) std::atomic<std::uint64_t> steps = 0;
  // Where the thread ran when its round began and when it ended.
  std::atomic<int> core = -1, last_core = -1;
};

class Trial {
 public:
  explicit Trial(Nanoseconds limit) : end_(now() + limit) {}

  static Nanoseconds now() { return SteadyClock().now(); }
  // One round of both threads: each fills its buffers, and then reads those of the other. False
  // once the trial has been stopped.
  [[nodiscard]] bool run_round(std::size_t side, StoreKind kind) {
    Side& mine = sides_[side];
    const Side& peer = sides_[1 - side];
    mine.core.store(current_core(), std::memory_order_relaxed);
    const Stores stores(kind);
    for (std::size_t i = 0; i < kBuffers; ++i) {
      (void)stores.fill(kSegmentBytesMax, mine.slots[i], mine.own[i], kSegmentBytesMax);
    }
    stream_fence();
    if (!meet(side)) return false;
    for (std::size_t i = 0; i < kBuffers; ++i) {
      copy_bytes(mine.own[i], peer.slots[i], kSegmentBytesMax);
    }
    mine.last_core.store(current_core(), std::memory_order_relaxed);
    return meet(side);
  }
  void stop() { stopped_.store(true, std::memory_order_relaxed); }
  // Whether both threads have stayed on two cores in the last round. Threads of other processes may
  // drive both onto one core, whose caches make any stores fast.
  bool on_two_cores() const {
    return sides_[0].core != sides_[1].core && sides_[0].core == sides_[0].last_core &&
           sides_[1].core == sides_[1].last_core;
  }

 private:
  // Waits until both threads have made as many steps; false once the trial has been stopped or its
  // time is over.
  [[nodiscard]] bool meet(std::size_t side) {
    const std::uint64_t step = sides_[side].steps.load(std::memory_order_relaxed) + 1;
    sides_[side].steps.store(step, std::memory_order_release);
    for (int polls = 1; sides_[1 - side].steps.load(std::memory_order_acquire) < step; ++polls) {
      if (stopped_.load(std::memory_order_relaxed) || now() > end_) return false;
      if (polls % kPollsMax == 0) std::this_thread::yield();
    }
    return true;
  }

  std::array<Side, 2> sides_;
  std::atomic<bool> stopped_ = false;
  const Nanoseconds end_;
};

// The kind of stores of a round: both threads count the rounds alike.
StoreKind kind_of(int round) {
  return static_cast<StoreKind>(static_cast<std::size_t>(round / kRoundsInARow) % kStoreKinds);
}

constexpr int kRounds = kStoreKinds * kRoundsInARow * kRoundsEnough / (kRoundsInARow - 1);

// A usable core other than that of the calling thread; -1 if the system reports none.
int other_core() {
  const std::vector<int> cores = usable_core_numbers();
  const auto own = std::find(cores.begin(), cores.end(), current_core());
  if (own == cores.end() || cores.size() < 2) return -1;
  return own + 1 == cores.end() ? cores.front() : *(own + 1);
}

// The scheduler often starts a thread on the core of its parent and leaves it there for longer than
// the measurement lasts, so it first moves to `core`.
void run_second(Trial& trial, int core) {
  move_to_core(core);
  for (int round = 0; round < kRounds; ++round) {
    if (!trial.run_round(1, kind_of(round))) return;
  }
}

StoreTimes run_first(Trial& trial) {
  StoreTimes best{};
  for (int round = 0; round < kRounds; ++round) {
    const Nanoseconds begin = Trial::now();
    if (!trial.run_round(0, kind_of(round))) break;
    const Nanoseconds each =
        (Trial::now() - begin) * 1024 / static_cast<Nanoseconds>(kBuffers * kSegmentBytesMax);
    if (round % kRoundsInARow == 0 || !trial.on_two_cores()) continue;
    Nanoseconds& shortest = best[static_cast<std::size_t>(kind_of(round))];
    shortest = shortest == 0 ? each : std::min(shortest, each);
  }
  trial.stop();
  return best;
}

}  // namespace

std::optional<StoreTimes> time_stores(Nanoseconds limit) {
  if (usable_cores() < 2) return std::nullopt;
  const auto trial = std::make_unique<Trial>(limit);
  std::thread second;
  try {
    second = std::thread([&trial, core = other_core()] { run_second(*trial, core); });
  } catch (const std::system_error&) {
    return std::nullopt;
  }
  const StoreTimes best = run_first(*trial);
  second.join();
  if (std::find(best.begin(), best.end(), 0) != best.end()) return std::nullopt;
  return best;
}

}  // namespace pycoll::transport::shm
