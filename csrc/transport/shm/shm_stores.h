// The stores that fill memory which a peer reads next: ordinary stores, streaming stores that
// bypass the caches, or a string instruction.
//
// The peer has read a reused slot buffer last, so an ordinary store first fetches the line from the
// peer's cache. If that transfer is fast, the peer then finds the data in a near cache. If it is
// slow, it is faster to write to memory and let the peer read from memory, or to take the line over
// without reading it, as string instructions of newer processors do. The best of the three depends
// on the processor, so it is a value of the tuning (pycoll/cost/slot_stores.py), which all ranks
// agree on and which is constant for the life of a communicator. time_stores() measures it.
//
// With shared cores the peer may read on the core of its sender. Receivers therefore publish the
// core on which they read, and a fill for a reader on this core uses ordinary stores.
#pragma once

#include <sched.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/cache.h"
#include "base/clock.h"
#include "base/copy.h"
#include "transport/shm/shm_layout.h"

namespace pycoll::transport::shm {

enum class StoreKind : std::uint8_t { kOrdinary, kStreaming, kString };
inline constexpr std::size_t kStoreKinds = 3;
// In the order of StoreKind; the names of the tuning.
inline constexpr std::array<std::string_view, kStoreKinds> kStoreNames = {"ordinary", "streaming",
                                                                          "string"};

// Shorter segments always use ordinary stores, because the choice gains too little.
inline constexpr std::size_t kChosenBytesMin = 2 * 1024;
// Write windows that are longer than this number of a core's caches use streaming stores.
inline constexpr std::size_t kWindowCaches = 8;

// For one channel. One thread at a time.
class Stores {
 public:
  // `reader_core`: with shared cores the core on which the peer read last, + 1; otherwise nullptr.
  // It outlives this object.
  explicit Stores(StoreKind kind, const std::uint64_t* reader_core = nullptr)
      : kind_(kind), reader_core_(reader_core) {}

  // Whether the caller should make the payload of the next segment elsewhere and then fill() it in,
  // instead of making it in the slot buffer. Also whether to copy data in this core's cache instead
  // of exposing it, because a zero-copy read would take the peer as long.
  bool wants_fill(std::size_t all_bytes) const {
    return kind_ != StoreKind::kOrdinary && all_bytes >= kChosenBytesMin && !is_near();
  }

  // Copies a part of a payload that has `all_bytes` in total, or all of it. True if stream_fence()
  // must precede later stores.
  bool fill(std::size_t all_bytes, std::byte* slot_buffer, const std::byte* from,
            std::size_t bytes) const {
    if (wants_fill(all_bytes)) {
      const bool streams = kind_ == StoreKind::kStreaming;
      streams ? stream_copy(slot_buffer, from, bytes) : string_copy(slot_buffer, from, bytes);
      return streams;
    }
    if (reader_core_ == nullptr) {
      prefetch_and_copy(slot_buffer, from, bytes);
    } else {
      // With shared cores it is unknown which core's cache holds the lines: nothing is prefetched.
      copy_bytes(slot_buffer, from, bytes);
    }
    return false;
  }

 private:
  bool is_near() const {
    return reader_core_ != nullptr &&
           load_acquire(*reader_core_) == static_cast<std::uint64_t>(sched_getcpu()) + 1;
  }

  StoreKind kind_;
  const std::uint64_t* reader_core_;
};

// Whether streaming stores suit a write window of `window_bytes` in total. Both ranks use the
// memory of a window again, so ordinary stores suit unless the window is longer than the caches
// hold. They also suit where this rank's caches hold the window's lines already (`cached`): a
// streaming store would first have to write them back.
inline bool window_wants_streams(std::size_t window_bytes, bool cached) {
  return !cached && window_bytes > kWindowCaches * core_cache_bytes();
}

// Nanoseconds that two ranks on two cores take to exchange one KiB through slot buffers, by
// StoreKind.
using StoreTimes = std::array<Nanoseconds, kStoreKinds>;

// Measures all kinds of stores between the calling thread and a second one, which ends before the
// call returns. Takes at most `limit` and a few rounds of microseconds. Without a result if the
// process may use one core only, if both threads ran on one core, or if the system starts no
// thread.
std::optional<StoreTimes> time_stores(Nanoseconds limit);

}  // namespace pycoll::transport::shm
