// The layout of a rank's shared file. Each rank owns one file, which it alone writes and its peers
// map read-only:
//
//   control page   the owner's identity; its sleep epoch; its notices; whether it has closed; the
//                  core on which it runs; the location of its arena
//   ack lines      one per peer: the number of segments that the owner has released, the channels
//                  on which it waits, the peer's arena that it has mapped, its write windows
//   peer blocks    one per peer: headers of the segments that the owner sends to that peer on all
//                  channels, and slot buffers for their payloads
//
// A header states where its payload is:
//   - in the slot buffer of its own peer block;
//   - in a slot buffer of another peer block of the owner, if several peers read the same payload;
//   - exposed: in the arena of the owner's process (shm_arena.h), for a zero-copy read;
//   - written directly: in the arena of the receiver's process.
//
// The file is sparse: a peer block without traffic uses address space but no memory. Shared words
// are 64 bits wide and are accessed through the functions below only; counters never decrease.
// Words with different readers are 128 bytes apart, because processors fetch cache lines in pairs.
#pragma once

#include "base/bytes.h"
#include "transport/transport.h"

namespace pycoll::transport::shm {

inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kLinePair = 128;

inline constexpr std::uint64_t kMagic = 0x6c6c6f6379700009;  // "pycoll", layout version 9

// Notices rotate over this many places, so that a reader can copy one while several posts pass.
inline constexpr std::uint32_t kNoticePlaces = 4;

struct alignas(kLinePair) Identity {
  std::uint64_t magic;
  std::uint64_t file_bytes;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t barriers_when_arming;  // 1: the owner's arm() makes all processors execute a fence
  std::uint32_t reserved;
};

// Odd while the owner sleeps. Every arm() and every disarm() adds one.
struct alignas(kLinePair) Sleep {
  std::uint64_t epoch;
};

// Written only if ranks share cores.
struct alignas(kLinePair) Running {
  std::uint64_t core;  // the core on which the owner ran last, + 1; 0: not yet published
};

// The words that a peer's poll() reads, in one cache line.
struct alignas(kLinePair) News {
  std::uint64_t notices;  // posted so far; the newest lies at notices % kNoticePlaces
  std::uint64_t closed;   // 1 once the owner has closed in good order
};

struct alignas(kLinePair) NoticePlace {
  std::uint64_t words[sizeof(Notice) / sizeof(std::uint64_t)];
};

// The location of the arena that holds exposed payloads. The owner writes `generation` last.
struct alignas(kLinePair) ZeroCopy {
  std::uint64_t generation;  // of the arena, see ArenaFile; 0: no arena published yet
  std::uint64_t bytes;
  std::uint64_t key;
  std::uint64_t fd;  // of the arena file in the owner's process
  // 1 once exposed memory may change; readers must then discard what they have read.
  std::uint64_t withdrawn;
};

struct alignas(kPage) Control {
  Identity identity;
  Sleep sleep;
  News news;
  Running running;
  ZeroCopy zero_copy;
  NoticePlace notices[kNoticePlaces];
};
static_assert(sizeof(Control) == kPage);

// The write window that the owner offers to the peer on one channel. It lies in the owner's arena.
// `sequence` is 0 while the other words change. If `uses` is 0 the words below it have no meaning.
struct alignas(kLinePair) WindowLine {
  std::uint64_t sequence;
  std::uint64_t agreement;
  std::uint64_t uses;
  std::uint64_t generation;  // of the arena
  std::uint64_t offset;      // of the window in the arena
  std::uint64_t bytes;
};

struct alignas(kLinePair) AckLine {
  std::uint64_t released[kChannelsMax];
  // One bit per channel on which the owner waits for this peer to release segments: reserve() found
  // no free slot, or exposed memory is still being read.
  std::uint64_t starved;
  std::uint64_t arena;  // generation of the peer's arena that the owner has mapped
  WindowLine windows[kChannelsMax];
};

// A segment's header, followed by its payload or the payload's location. A payload of up to
// kInlineBytes follows the header, so that one cache line, or one pair of lines that processors
// fetch together, moves the whole segment between cores. For a longer payload `payload` holds an
// offset of 8 bytes: from the start of the owner's shared file, or, with kZeroCopyBit, from the
// start of its arena. With kWrittenDirectlyBit the payload is in the receiver's write window.
struct alignas(kLinePair) SlotLine {
  std::uint64_t stamp;  // this slot holds segment number stamp - 1 of the channel
  SegmentHeader header;
  std::byte payload[96];
};
inline constexpr std::size_t kInlineBytes = sizeof(SlotLine::payload);
inline constexpr std::size_t kFirstLineBytes = 32;  // payload bytes in the line of the header
inline constexpr std::uint64_t kZeroCopyBit = std::uint64_t{1} << 63;
inline constexpr std::uint64_t kWrittenDirectlyBit = std::uint64_t{1} << 62;
static_assert(offsetof(SlotLine, payload) + kFirstLineBytes == kLinePair / 2 &&
              sizeof(SlotLine) == kLinePair);

// Not a multiple of the page size; otherwise equal offsets of all slots would compete for the same
// few sets of the first-level cache.
inline constexpr std::size_t kPayloadStride = kSegmentBytesMax + kLinePair;

// All slot lines of a peer block are adjacent, so that small segments of all channels share one
// page.
inline constexpr std::size_t kPeerBlockLines = kChannelsMax * kChannelDepth * sizeof(SlotLine);
inline constexpr std::size_t kSkews = 31;
inline constexpr std::size_t kPeerBlockBytes = round_up(
    kPeerBlockLines + kChannelsMax * kChannelDepth * kPayloadStride + kSkews * kLinePair, kPage);

constexpr std::size_t control_bytes(int size) {
  return sizeof(Control) + round_up(static_cast<std::size_t>(size) * sizeof(AckLine), kPage);
}
constexpr std::size_t peer_block_offset(int size, int peer) {
  return control_bytes(size) + static_cast<std::size_t>(peer) * kPeerBlockBytes;
}
constexpr std::size_t shared_file_bytes(int size) { return peer_block_offset(size, size); }

// The offset of a peer block's content. It differs between owners, so that the lines of many owners
// do not compete for one cache set of a common reader.
constexpr std::size_t peer_block_skew(int owner) {
  return static_cast<std::size_t>(owner) % kSkews * kLinePair;
}
constexpr std::size_t slot_line_offset(std::uint32_t channel) {
  return channel * kChannelDepth * sizeof(SlotLine);
}
constexpr std::size_t payload_offset(std::uint32_t channel) {
  return kPeerBlockLines + channel * kChannelDepth * kPayloadStride;
}

// Acquire: later reads of this thread are not reordered before these reads.
inline std::uint64_t load_acquire(const std::uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
inline std::uint64_t load_ordered(const std::uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}
// Release: earlier writes of this thread are visible before these writes.
inline void store_release(std::uint64_t& word, std::uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}
inline void store_ordered(std::uint64_t& word, std::uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

// `word` is the owner's Running::core. Writes only if the core has changed,
// to keep the line shared.
inline void tell_core(std::uint64_t* word, int core) {
  const auto told = static_cast<std::uint64_t>(core) + 1;
  if (*word != told) store_release(*word, told);
}

}  // namespace pycoll::transport::shm
