// The receiving end of a shared-memory channel. All functions are inline. No call enters the kernel
// unless the peer sleeps.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "transport/shm/shm_stores.h"
#include "transport/shm/shm_wiring.h"

namespace pycoll::transport::shm {

// The peer's first invalid header. The channel records it; the link turns it into a loss.
struct Fault {
  bool found = false;
  std::uint32_t claimed_bytes = 0;
  std::uint64_t claimed_offset = 0;  // of the payload; meaningful if claimed_bytes is valid
};

// The state that a small segment uses, see SendRing.
class RecvRing {
 protected:
  RecvRing(const SlotLine* lines, std::uint64_t* released, Bell* bell, Fault* fault)
      : lines_(lines), released_(released), bell_(bell), fault_(fault) {}

  const SlotLine* lines_;
  std::uint64_t* released_;
  Bell* bell_;
  Fault* fault_;
  std::uint64_t head_ = 0;      // segments released
  std::uint64_t reported_ = 0;  // segments that peek() or has_news() has reported
  bool peeked_ = false;
  Segment arrived_;
};

struct RecvAbilities : ZeroCopyReceiver, WriteWindows {};

class alignas(64) ShmRecvChannel final : public RecvChannel, RecvRing, RecvAbilities {
 public:
  // After a fault no channel of the link receives any more. `fault` outlives the channel. `lines`
  // are this channel's slot lines in the peer's `shared_file`.
  ShmRecvChannel(std::uint32_t number, Whole<const std::byte> shared_file, const SlotLine* lines,
                 const Wiring& wiring, Fault* fault)
      : RecvRing(lines, &wiring.own_acks->released[number], wiring.bell, fault),
        shared_file_(shared_file),
        peer_starved_(&wiring.peer_acks->starved),
        starved_bit_(std::uint64_t{1} << number),
        zero_copy_source_(wiring.zero_copy_source),
        peer_arena_(wiring.peer_arena),
        window_(&wiring.own_acks->windows[number]),
        own_core_(wiring.own_core) {}

  const Segment* peek() override {
    if (peeked_) return &arrived_;
    const SlotLine& line = lines_[head_ % kChannelDepth];
    if (load_acquire(line.stamp) != head_ + 1 || fault_->found) return nullptr;
    return take(line);
  }

  // Prevents the memory of the last write window from being allocated again.
  void keep_window() {
    if (window_memory_ != nullptr) zero_copy_source_->keep(window_memory_);
  }

  void release() override {
    PYCOLL_ASSERT(peeked_, "release of segment %llu before peek",
                  static_cast<unsigned long long>(head_));
    peeked_ = false;
    if (own_core_ != nullptr && arrived_.header.bytes >= kChosenBytesMin) {
      tell_core(own_core_, sched_getcpu());
    }
    if (std::exchange(arrived_.exposed, false)) peer_arena_->release();
    bell_->publish_if_wanted(*released_, ++head_, *peer_starved_, starved_bit_);
    // With shared cores the next segment has hardly arrived yet.
    if (own_core_ == nullptr) fetch_ahead();
  }

  RecvCapabilities capabilities() override { return {.zero_copy = this, .windows = this}; }

  // True once for a segment that has arrived and that peek() has not returned yet.
  bool has_news() {
    if (peeked_ || reported_ == head_ + 1) return false;
    if (load_ordered(lines_[head_ % kChannelDepth].stamp) != head_ + 1) return false;
    reported_ = head_ + 1;
    return true;
  }

 private:
  bool intact() override { return !arrived_.exposed || peer_arena_->intact(); }

  // The peer may read the line meanwhile; it compares `sequence` before and after its read.
  void open_window(const WriteWindow& window) override {
    std::uint64_t offset = 0;
    const bool opens =
        window.uses != 0 && zero_copy_source_->tell(window.memory, window.bytes, &offset);
    store_release(window_->sequence, 0);
    store_release(window_->uses, opens ? window.uses : 0);
    if (opens) {
      store_release(window_->agreement, window.agreement);
      store_release(window_->generation, zero_copy_source_->generation());
      store_release(window_->offset, offset);
      store_release(window_->bytes, window.bytes);
      window_memory_ = window.memory;
    }
    bell_->publish(window_->sequence, window.sequence);  // the peer may be waiting for it
  }

  // Copies the header before it checks it, because the peer could still change the original.
  [[nodiscard]] const Segment* take(const SlotLine& line) {
    std::memcpy(&arrived_.header, &line.header, sizeof(arrived_.header));
    const std::uint32_t bytes = arrived_.header.bytes;
    std::uint64_t offset = 0;
    if (bytes > kInlineBytes) std::memcpy(&offset, line.payload, sizeof(offset));
    arrived_.written_directly =
        offset == kWrittenDirectlyBit && window_memory_ != nullptr && bytes <= kSegmentBytesMax;
    const std::byte* data = bytes <= kSegmentBytesMax ? find(line, bytes, offset) : nullptr;
    if (data == nullptr && !arrived_.written_directly) {
      *fault_ = {true, bytes, offset & ~kZeroCopyBit};
      return nullptr;
    }
    arrived_.data = bytes == 0 ? nullptr : data;
    arrived_.exposed = (offset & kZeroCopyBit) != 0;
    reported_ = head_ + 1;
    peeked_ = true;
    // Fetches the next slot line, so that it is in the cache when this segment has been combined.
    // If the next segment has not arrived yet, the peer still owns the line and nothing is lost.
    __builtin_prefetch(&lines_[(head_ + 1) % kChannelDepth]);
    return &arrived_;
  }

  // Prefetches the beginning of the next payload if that segment has already arrived. Earlier, the
  // prefetch would take the lines from the peer while it writes them.
  void fetch_ahead() const {
    constexpr std::uint64_t kLine = 64, kAhead = 1024;
    const SlotLine& line = lines_[head_ % kChannelDepth];
    if (load_acquire(line.stamp) != head_ + 1 || line.header.bytes <= kInlineBytes) return;
    std::uint64_t offset = 0;
    std::memcpy(&offset, line.payload, sizeof(offset));
    if (offset > shared_file_.bytes) return;  // the payload is in an arena
    const std::uint64_t bytes =
        std::min<std::uint64_t>(line.header.bytes, shared_file_.bytes - offset);
    for (std::uint64_t at = 0; at < std::min(bytes, kAhead); at += kLine) {
      __builtin_prefetch(shared_file_.base + offset + at);
    }
  }

  // Returns the address of the payload; nullptr if the header locates it outside all known memory.
  [[nodiscard]] const std::byte* find(const SlotLine& line, std::uint32_t bytes,
                                      std::uint64_t offset) {
    if (bytes <= kInlineBytes) return line.payload;
    if ((offset & kZeroCopyBit) != 0) return peer_arena_->acquire(offset & ~kZeroCopyBit, bytes);
    if (bytes >= kUncopiedBytesMin) peer_arena_->refresh();
    return offset <= shared_file_.bytes - bytes ? shared_file_.base + offset : nullptr;
  }

  Whole<const std::byte> shared_file_;
  const std::uint64_t* peer_starved_;
  std::uint64_t starved_bit_;
  ZeroCopySource* zero_copy_source_;
  PeerArena* peer_arena_;
  WindowLine* window_;
  const std::byte* window_memory_ = nullptr;  // memory of the last write window
  std::uint64_t* own_core_;
};

}  // namespace pycoll::transport::shm
