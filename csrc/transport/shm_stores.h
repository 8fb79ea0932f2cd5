// Which stores fill the rooms of a shared-memory channel: ordinary ones, or such as go past the
// caches.
//
// Room that is used again was last read by the peer, so an ordinary store has to fetch its line
// from the peer's cache first. Between cores that share a cache this is quick, and the peer then
// finds the line near. Between cores that do not, it is so slow that writing to memory, where the
// peer reads it, took 0.4 to 0.5 of the time of an all_reduce of 256 KiB to 32 MiB. Where two ranks
// run may change while they do, and does on virtual machines; so a channel looks again and again.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "base/clock.h"
#include "base/copy.h"
#include "transport/shm_layout.h"

namespace pycoll::transport::shm {

// One thread at a time.
class Stores {
 public:
  // `streaming`: settled for good, instead of by looking.
  explicit Stores(std::optional<bool> streaming)
      : settled_(streaming.has_value()), streaming_(streaming.value_or(false)) {}

  bool streaming() const { return streaming_; }

  // To be called for every room of `bytes` before it is filled. `word` is the peer's, and stood at
  // `known` when it was read last: if it has changed, its line comes from the peer's cache, which
  // takes as long as the peer is far.
  void look(std::size_t bytes, const std::uint64_t& word, std::uint64_t known) {
    if (bytes < kStreamedBytesMin || settled_ || ++rooms_ < kRoomsPerLook) return;
    SteadyClock clock;
    const Nanoseconds begin = clock.now();
    if (load_acquire(word) == known) return;
    rooms_ = 0;
    times_[looks_++ % kLooks] = clock.now() - begin;
    if (looks_ < kLooks) return;
    auto sorted = times_;
    std::nth_element(sorted.begin(), sorted.begin() + kLooks / 2, sorted.end());
    streaming_ = sorted[kLooks / 2] > kFar;
  }

  // True if later stores must be ordered behind it by stream_fence().
  bool fill(std::byte* room, const std::byte* from, std::size_t bytes) const {
    if (bytes >= kStreamedBytesMin && streaming_) {
      stream_copy(room, from, bytes);
      return true;
    }
    copy_bytes(room, from, bytes);
    return false;
  }

 private:
  // Short payloads are not worth another way.
  static constexpr std::size_t kStreamedBytesMin = 2 * 1024;
  static constexpr std::uint32_t kRoomsPerLook = 4;
  static constexpr std::size_t kLooks = 5;
  // Measured, with the clock's own: 30 to 60 where a cache is shared, 160 to 170 where not (Zen 3).
  static constexpr Nanoseconds kFar = 110;

  bool settled_;
  bool streaming_;
  std::uint32_t rooms_ = 0;
  std::size_t looks_ = 0;
  std::array<Nanoseconds, kLooks> times_ = {};
};

}  // namespace pycoll::transport::shm
