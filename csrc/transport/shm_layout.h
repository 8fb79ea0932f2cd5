// What lies where in a rank's shared segment. Each rank owns one segment, which it alone writes and
// its peers map read-only:
//
//   control page   who the owner is; whether it sleeps; its notices; whether it has closed; on
//                  which core it runs; where its arena is
//   ack lines      one per peer: how many segments the owner has released, what it waits for, which
//                  arena of the peer it can read, what it offers
//   lanes          one block per peer: headers of the segments that the owner sends to it, all
//                  channels, and room for their payloads
//
// A header tells where in the owner's segment its payload lies: in the lane's own room, or in
// another's if several peers are to read the same payload. Or the payload is lent: it lies in the
// arena of the owner's process (shm_arena.h). Or it is placed: in the arena of the receiver's.
//
// The file is sparse: a lane that carries nothing costs address space, no memory. Words that change
// hands are 64 bits wide, only ever grow, and are read and written through the functions below.
// Words with different readers keep 128 bytes apart, since processors fetch lines in pairs.
#pragma once

#include "base/bytes.h"
#include "transport/transport.h"

namespace pycoll::transport::shm {

inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kLinePair = 128;

inline constexpr std::uint64_t kMagic = 0x6c6c6f6379700009;  // "pycoll", layout version 9

// Notices go round over this many places, so that a reader has the time of several posts to copy
// one.
inline constexpr std::uint32_t kNoticePlaces = 4;

struct alignas(kLinePair) Identity {
  std::uint64_t magic;
  std::uint64_t segment_bytes;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t barriers_when_arming;  // 1: the owner's arm() makes all processors fence
  std::uint32_t reserved;
};

// Odd while the owner sleeps; every arm() and disarm() adds one.
struct alignas(kLinePair) Sleep {
  std::uint64_t epoch;
};

// Told where ranks share cores.
struct alignas(kLinePair) Running {
  std::uint64_t core;  // + 1, on which the owner ran last; 0: untold
};

// What a peer's poll() looks at, in one line.
struct alignas(kLinePair) News {
  std::uint64_t notices;  // posted so far; the newest lies at notices % kNoticePlaces
  std::uint64_t closed;   // 1 once the owner has closed in good order
};

struct alignas(kLinePair) NoticePlace {
  std::uint64_t words[sizeof(Notice) / sizeof(std::uint64_t)];
};

// Where payloads are lent from. The other words are written before `generation`.
struct alignas(kLinePair) Lending {
  std::uint64_t generation;  // of the arena, see ArenaFile; 0: none so far
  std::uint64_t bytes;
  std::uint64_t key;
  std::uint64_t fd;  // in the owner's process
  std::uint64_t
      withdrawn;  // 1 once what was lent may change: whoever reads it no longer may use it
};

struct alignas(kPage) Control {
  Identity identity;
  Sleep sleep;
  News news;
  Running running;
  Lending lending;
  NoticePlace notices[kNoticePlaces];
};
static_assert(sizeof(Control) == kPage);

// What the owner lets the peer write on one channel, in the owner's arena. `sequence` is 0 while
// the other words change; without `uses` the others say nothing.
struct alignas(kLinePair) OfferLine {
  std::uint64_t sequence;
  std::uint64_t agreement;
  std::uint64_t uses;
  std::uint64_t generation;  // of the arena
  std::uint64_t offset;      // of the memory in it
  std::uint64_t bytes;
};

struct alignas(kLinePair) AckLine {
  std::uint64_t released[kChannelsMax];
  // Bit per channel on which the owner found no room to send to this peer, or waits until what it
  // lent is read.
  std::uint64_t starved;
  std::uint64_t arena;  // generation of the peer's arena that the owner has mapped
  OfferLine offers[kChannelsMax];
};

// A segment's header, and its payload if that is small: one line carries both from core to core, or
// two, which processors fetch together; no other page is touched. Otherwise the payload's offset
// from the start of the owner's segment stands there, 8 bytes; with kLentBit, from the start of its
// arena. With kPlacedBit the payload is where the receiver offered.
struct alignas(kLinePair) SlotLine {
  std::uint64_t stamp;  // this slot holds segment number stamp - 1 of the channel
  SegmentHeader header;
  std::byte payload[96];
};
inline constexpr std::size_t kInlineBytes = sizeof(SlotLine::payload);
inline constexpr std::size_t kFirstLineBytes = 32;  // of the payload, beside the header
inline constexpr std::uint64_t kLentBit = std::uint64_t{1} << 63;
inline constexpr std::uint64_t kPlacedBit = std::uint64_t{1} << 62;
// Shorter payloads are copied: to wait until they are read would take longer.
inline constexpr std::size_t kLentBytesMin = 4 * 1024;
static_assert(offsetof(SlotLine, payload) + kFirstLineBytes == kLinePair / 2 &&
              sizeof(SlotLine) == kLinePair);

// Payloads are not a multiple of a page apart, else equal offsets of all slots would meet in the
// same few sets of the first-level cache.
inline constexpr std::size_t kPayloadStride = kSegmentBytesMax + kLinePair;

// All slot lines of a lane lie together: small segments of all channels share one page.
inline constexpr std::size_t kLaneLines = kChannelsMax * kChannelDepth * sizeof(SlotLine);
inline constexpr std::size_t kSkews = 31;
inline constexpr std::size_t kLaneBytes = round_up(
    kLaneLines + kChannelsMax * kChannelDepth * kPayloadStride + kSkews * kLinePair, kPage);

constexpr std::size_t control_bytes(int size) {
  return sizeof(Control) + round_up(static_cast<std::size_t>(size) * sizeof(AckLine), kPage);
}
constexpr std::size_t lane_offset(int size, int peer) {
  return control_bytes(size) + static_cast<std::size_t>(peer) * kLaneBytes;
}
constexpr std::size_t segment_file_bytes(int size) { return lane_offset(size, size); }

// Where a lane's content begins: different for each owner, so that a reader of many owners does not
// find all their lines in one cache set.
constexpr std::size_t lane_skew(int owner) {
  return static_cast<std::size_t>(owner) % kSkews * kLinePair;
}
constexpr std::size_t slot_line_offset(std::uint32_t channel) {
  return channel * kChannelDepth * sizeof(SlotLine);
}
constexpr std::size_t payload_offset(std::uint32_t channel) {
  return kLaneLines + channel * kChannelDepth * kPayloadStride;
}

// Reads that later reads of the same thread may not overtake.
inline std::uint64_t load_acquire(const std::uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
inline std::uint64_t load_ordered(const std::uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}
// Writes that earlier writes of the same thread may not be seen after.
inline void store_release(std::uint64_t& word, std::uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}
inline void store_ordered(std::uint64_t& word, std::uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

// `word` is the owner's Running::core. Writes only when the core is another than last time.
inline void tell_core(std::uint64_t* word, int core) {
  const auto told = static_cast<std::uint64_t>(core) + 1;
  if (*word != told) store_release(*word, told);
}

}  // namespace pycoll::transport::shm
