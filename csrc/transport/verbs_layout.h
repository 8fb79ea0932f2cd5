// What lies where in the memory that a peer writes into, and what the 32 bits say that come with a
// message: the wire of the verbs transport as structs. VERBS.md is the page.
//
// The sender keeps an area of the same layout, from which it sends: what lies at an offset there
// arrives at the same offset here.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/bytes.h"
#include "transport/transport.h"

namespace pycoll::transport::verbs {

static_assert(std::endian::native == std::endian::little, "structs travel as they lie in memory");

// Travels in front of every payload.
struct SlotHeader {
  SegmentHeader header;
  // Per channel, as in a TCP frame; see WIRE.md. Zero for channels whose credits another rail has.
  std::uint8_t released[kChannelsMax];
};
static_assert(sizeof(SlotHeader) == 32 && std::is_trivially_copyable_v<SlotHeader>);

// kChannelDepth of this medium.
inline constexpr std::uint32_t kVerbsDepth = 8;
static_assert(kVerbsDepth >= kChannelDepth && kVerbsDepth < 256);

// Rails that a link may have; one channel fills them all.
inline constexpr std::uint32_t kRailsMax = 4;
// A link has 1, 2 or 4, so that a slot is always served by the same one.
constexpr bool is_rail_count(std::size_t count) {
  return std::has_single_bit(count) && count <= kRailsMax;
}
static_assert(std::has_single_bit(kVerbsDepth) && kRailsMax <= kVerbsDepth);

// Which of a link's `rails` a segment takes.
constexpr std::uint32_t rail_of_segment(std::uint32_t channel, std::uint32_t segment,
                                        std::uint32_t rails) {
  return (channel + segment) & (rails - 1);
}
// Which one takes the counts of a channel's released segments, in credits and before payloads.
constexpr std::uint32_t rail_of_credits(std::uint32_t channel, std::uint32_t rails) {
  return channel & (rails - 1);
}

// The header ends where the payload begins, so that both are one stretch of memory and the payload
// is aligned to 64 bytes. Strides are no multiple of 4096: slots would share their cache sets.
inline constexpr std::size_t kHeaderAt = 32;
inline constexpr std::size_t kPayloadAt = kHeaderAt + sizeof(SlotHeader);
inline constexpr std::size_t kSlotStride = kPayloadAt + kSegmentBytesMax + 256;
static_assert(kPayloadAt == 64 && kSlotStride % 64 == 0 && kSlotStride % 4096 != 0);

// A notice that replaces the one before, and the last one of all, which waits for nothing.
enum class NoticePlace : std::uint8_t { kNewest, kFinal };
constexpr std::size_t notice_offset(NoticePlace place) {
  return static_cast<std::size_t>(place) * sizeof(Notice);
}

// In the area of its rail. Counters of segments may run on: a slot serves every kVerbsDepth-th.
inline constexpr std::size_t kSlotsAt = notice_offset(NoticePlace{2});
constexpr std::size_t slot_offset(std::uint32_t channel, std::uint32_t segment,
                                  std::uint32_t rails) {
  const std::uint32_t slot = channel * kVerbsDepth + segment % kVerbsDepth;
  return kSlotsAt + (slot >> std::countr_zero(rails)) * kSlotStride;
}
// Of one rail: an equal share of all slots, and places for notices.
constexpr std::size_t area_bytes(std::uint32_t rails) {
  return round_up(kSlotsAt + kChannelsMax * kVerbsDepth / rails * kSlotStride, 4096);
}

// The first byte of the immediate value that ends every message.
enum class Kind : std::uint8_t {
  kSegment = 1,     // channel; number of the segment
  kCredit = 2,      // channel; number of segments released
  kNotice = 3,      // place in the second byte; one has been written there
  kNoticeSeen = 4,  // the newest notice was read, and may be replaced
  kGoodbye = 5,     // nothing follows on this rail
  kPlaced = 6,      // as kSegment, but the payload is in the receiver's region
  kAlike = 7,       // as kSegment, but without a header: it is that of the last one on this rail
};

struct Immediate {
  Kind kind = Kind::kGoodbye;
  std::uint8_t which = 0;    // channel or place
  std::uint16_t number = 0;  // modulo 2^16

  constexpr std::uint32_t bits() const {
    return static_cast<std::uint32_t>(kind) << 24 | static_cast<std::uint32_t>(which) << 16 |
           number;
  }
  static constexpr Immediate of(std::uint32_t bits) {
    return {static_cast<Kind>(bits >> 24), static_cast<std::uint8_t>(bits >> 16),
            static_cast<std::uint16_t>(bits)};
  }
};

// What a peer must know to write here, one per rail; exchanged by the bootstrap.
struct PeerAddress {
  std::uint64_t magic = kMagic;
  std::uint64_t area = 0;  // address of the rail's area, which the peer may write
  std::uint32_t rkey = 0;
  std::uint32_t pair_number = 0;
  std::uint32_t packet_number = 0;  // of the first packet
  std::uint16_t lid = 0;            // 0 on Ethernet
  std::uint8_t mtu = 0;             // as in ibv_mtu
  std::uint8_t link_layer = 0;      // as in ibv_port_attr
  std::uint8_t gid[16] = {};

  static constexpr std::uint64_t kMagic = 0x0007'7362'7265'5650;  // "PVerbs", version 7
};
static_assert(sizeof(PeerAddress) == 48 && std::has_unique_object_representations_v<PeerAddress>);

// What a peer must know to write payloads into a part of this rank's region: Link::grant().
struct Grant {
  std::uint64_t magic = kMagic;
  std::uint64_t address = 0;                     // of the part's first byte
  std::uint64_t bytes = 0;                       // of the part
  std::array<std::uint32_t, kRailsMax> rkeys{};  // by rail; 0 behind the last one

  static constexpr std::uint64_t kMagic = 0x0001'746e'6172'4750;  // "PGrant", version 1
};
static_assert(sizeof(Grant) == 40 && std::has_unique_object_representations_v<Grant>);

}  // namespace pycoll::transport::verbs
