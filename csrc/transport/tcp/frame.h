// The frames of the TCP transport: the format that WIRE.md defines, as a struct. The byte stream
// between two ranks is a sequence of frames; each frame is a header and `bytes` of payload.
//
// All functions are pure and safe from any thread.
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
              "frames are little-endian and are sent in their memory layout");

enum class FrameType : std::uint8_t {
  kData = 1,     // one segment of a channel
  kCredit = 2,   // counters only: segments were released and no data goes in that direction
  kNotice = 3,   // payload: one Notice
  kGoodbye = 4,  // the last frame on this socket: the sender closes in good order
};

inline constexpr std::uint8_t kFrameVersion = 7;
inline constexpr std::uint8_t kFrameMagic[3] = {'p', 'c', 'f'};

// The segments that a channel of this medium may have in flight before it needs a credit; see
// WIRE.md, "Credits".
inline constexpr std::uint32_t kTcpDepth = 32;

struct FrameHeader {
  std::array<std::uint8_t, 3> magic = {kFrameMagic[0], kFrameMagic[1], kFrameMagic[2]};
  std::uint8_t version = kFrameVersion;
  FrameType type = FrameType::kCredit;
  std::uint8_t channel = 0;     // kData only, otherwise 0
  std::uint16_t segment = 0;    // kData: segments before it on this channel, mod 2^16; otherwise 0
  std::uint32_t number = 0;     // frames before it on this socket in this direction, mod 2^32
  std::uint32_t bytes = 0;      // length of the payload that follows
  std::uint64_t sequence = 0;   // of SegmentHeader; kData only, otherwise 0
  std::uint64_t agreement = 0;  // of SegmentHeader; kData only, otherwise 0
  std::uint32_t tag = 0;        // of SegmentHeader; kData only, otherwise 0
  std::uint32_t check = 0;      // frame_check of the other bytes
  // Per channel: the segments that this frame's sender has released since the start, mod 256. Zero
  // for channels whose home is another socket.
  std::array<std::uint8_t, kChannelsMax> released = {};

  bool operator==(const FrameHeader&) const = default;
};
static_assert(sizeof(FrameHeader) == 48 && alignof(FrameHeader) == 8);
static_assert(std::has_unique_object_representations_v<FrameHeader>);
static_assert(offsetof(FrameHeader, type) == 4 && offsetof(FrameHeader, number) == 8 &&
              offsetof(FrameHeader, bytes) == 12 && offsetof(FrameHeader, sequence) == 16 &&
              offsetof(FrameHeader, agreement) == 24 && offsetof(FrameHeader, tag) == 32 &&
              offsetof(FrameHeader, check) == 36 && offsetof(FrameHeader, released) == 40);
// A counter modulo 256 must distinguish "no new release" from "all segments released".
static_assert(kTcpDepth >= kChannelDepth && kTcpDepth < 256);

// Returns a hash of every byte of `header` except `check` itself. It detects garbage and a stream
// out of step. It does not protect against an attacker; the handshake excludes attackers.
std::uint32_t frame_check(const FrameHeader& header);

// The faults of a header, in the order in which judge() checks for them.
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

// Checks a header from a peer that must have sent `number` frames before it. Looks at the header
// alone: only the channel knows whether its credits allow the segment.
FrameFault judge(const FrameHeader& header, std::uint32_t number);

// "version 2, expected 1: run the same release of pycoll on all ranks"; for error messages.
std::string to_text(FrameFault fault, const FrameHeader& header, std::uint32_t number);

}  // namespace pycoll::transport
