// The frames of the TCP transport: what WIRE.md says, as a struct. A stream of bytes between two
// ranks is a sequence of frames, each a header and `bytes` of payload.
//
// Everything here is a pure function of its arguments; safe from any thread.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "transport/transport.h"

namespace pycoll::transport {

static_assert(std::endian::native == std::endian::little,
              "frames are little-endian and are sent as they lie in memory");

enum class FrameType : std::uint8_t {
  kData = 1,     // one segment of a channel
  kCredit = 2,   // only counters: room was freed and no data goes that way
  kNotice = 3,   // payload: one Notice
  kGoodbye = 4,  // the last frame on this socket: the sender closes in good order
};

inline constexpr std::uint8_t kFrameVersion = 6;
inline constexpr std::uint8_t kFrameMagic[3] = {'p', 'c', 'f'};

// kChannelDepth of this medium: so much is under way in each channel before a credit is needed.
// WIRE.md has what was measured.
inline constexpr std::uint32_t kTcpDepth = 32;

struct FrameHeader {
  std::array<std::uint8_t, 3> magic = {kFrameMagic[0], kFrameMagic[1], kFrameMagic[2]};
  std::uint8_t version = kFrameVersion;
  FrameType type = FrameType::kCredit;
  std::uint8_t channel = 0;     // kData only, otherwise 0
  std::uint16_t segment = 0;    // kData: sent before on this channel, mod 2^16; otherwise 0
  std::uint32_t number = 0;     // frames sent before on this socket in this direction, mod 2^32
  std::uint32_t bytes = 0;      // payload that follows
  std::uint64_t sequence = 0;   // of SegmentHeader; kData only, otherwise 0
  std::uint64_t agreement = 0;  // of SegmentHeader; kData only, otherwise 0
  std::uint32_t tag = 0;        // of SegmentHeader; kData only, otherwise 0
  std::uint32_t check = 0;      // frame_check of the other bytes
  // Per channel: segments that the sender of this frame has released since the start, mod 256.
  // Zero for channels whose home is another socket.
  std::array<std::uint8_t, kChannelsMax> released = {};

  bool operator==(const FrameHeader&) const = default;
};
static_assert(sizeof(FrameHeader) == 48 && alignof(FrameHeader) == 8);
static_assert(std::has_unique_object_representations_v<FrameHeader>);
static_assert(offsetof(FrameHeader, type) == 4 && offsetof(FrameHeader, number) == 8 &&
              offsetof(FrameHeader, bytes) == 12 && offsetof(FrameHeader, sequence) == 16 &&
              offsetof(FrameHeader, agreement) == 24 && offsetof(FrameHeader, tag) == 32 &&
              offsetof(FrameHeader, check) == 36 && offsetof(FrameHeader, released) == 40);
// The counters must tell "nothing new" from "everything released".
static_assert(kTcpDepth >= kChannelDepth && kTcpDepth < 256);

// A hash of every byte of `header` except `check` itself: recognises garbage and a stream that lost
// its place; no defence against an enemy, whom the handshake keeps out.
std::uint32_t frame_check(const FrameHeader& header);

// What is wrong with a header, in the order of looking.
enum class FrameFault : std::uint8_t {
  kNone,
  kMagic,
  kVersion,
  kCheck,
  kNumber,
  kType,
  kChannel,
  kBytes,
  kReserved,
};

// Judges a header as it came from the peer, who must have sent `number` frames before. Looks at the
// header alone: whether there is room for the segment only the channel can tell.
FrameFault judge(const FrameHeader& header, std::uint32_t number);

// "version 2, expected 1: run the same release of pycoll on all ranks"; for error messages.
std::string to_text(FrameFault fault, const FrameHeader& header, std::uint32_t number);

}  // namespace pycoll::transport
