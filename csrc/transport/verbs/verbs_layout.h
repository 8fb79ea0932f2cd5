// The wire of the verbs transport as structs: the layout of the memory that a peer writes, and the
// 32-bit immediate value of each message. VERBS.md specifies it.
//
// The sender keeps an area of the same layout and sends from it: bytes at an offset there arrive at
// the same offset in the peer's area.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/bytes.h"
#include "transport/transport.h"

namespace pycoll::transport::verbs {

static_assert(std::endian::native == std::endian::little, "structs travel as they lie in memory");

// Precedes every payload.
struct SlotHeader {
  SegmentHeader header;
  // By channel, as in a TCP frame; see WIRE.md. Zero for channels whose credits another rail
  // carries.
  std::uint8_t released[kChannelsMax];
};
static_assert(sizeof(SlotHeader) == 32 && std::is_trivially_copyable_v<SlotHeader>);

// Segments that a channel of this medium holds.
inline constexpr std::uint32_t kVerbsDepth = 8;
static_assert(kVerbsDepth >= kChannelDepth && kVerbsDepth < 256);

// Largest number of rails of a link. One channel uses all of them.
inline constexpr std::uint32_t kRailsMax = 4;
// A link has 1, 2 or 4 rails, so that a slot always belongs to the same rail.
constexpr bool is_rail_count(std::size_t count) {
  return std::has_single_bit(count) && count <= kRailsMax;
}
static_assert(std::has_single_bit(kVerbsDepth) && kRailsMax <= kVerbsDepth);

// The rail, of `rails` in total, that carries a segment.
constexpr std::uint32_t rail_of_segment(std::uint32_t channel, std::uint32_t segment,
                                        std::uint32_t rails) {
  return (channel + segment) & (rails - 1);
}
// The rail that carries the released counts of a channel, in credit messages and in headers.
constexpr std::uint32_t rail_of_credits(std::uint32_t channel, std::uint32_t rails) {
  return channel & (rails - 1);
}

// The header ends where the payload begins, so that both are contiguous and the payload is aligned
// to 64 bytes. The stride is not a multiple of 4096; otherwise slots would share cache sets.
inline constexpr std::size_t kHeaderAt = 32;
inline constexpr std::size_t kPayloadAt = kHeaderAt + sizeof(SlotHeader);
inline constexpr std::size_t kSlotStride = kPayloadAt + kSegmentBytesMax + 256;
static_assert(kPayloadAt == 64 && kSlotStride % 64 == 0 && kSlotStride % 4096 != 0);

// The newest notice, which replaces the one before, and the final one, which is sent at once.
enum class NoticePlace : std::uint8_t { kNewest, kFinal };
constexpr std::size_t notice_offset(NoticePlace place) {
  return static_cast<std::size_t>(place) * sizeof(Notice);
}

// Offset of a segment's slot in the area of its rail. `segment` may be any segment number: a slot
// serves every kVerbsDepth-th segment.
inline constexpr std::size_t kSlotsAt = notice_offset(NoticePlace{2});
constexpr std::size_t slot_offset(std::uint32_t channel, std::uint32_t segment,
                                  std::uint32_t rails) {
  const std::uint32_t slot = channel * kVerbsDepth + segment % kVerbsDepth;
  return kSlotsAt + (slot >> std::countr_zero(rails)) * kSlotStride;
}
// Bytes of the area of one rail: its share of all slots, and two places for notices.
constexpr std::size_t area_bytes(std::uint32_t rails) {
  return round_up(kSlotsAt + kChannelsMax * kVerbsDepth / rails * kSlotStride, 4096);
}

// The first byte of the immediate value of every message.
enum class Kind : std::uint8_t {
  kSegment = 1,          // channel; segment number
  kCredit = 2,           // channel; number of released segments
  kNotice = 3,           // place; a notice was written there
  kNoticeSeen = 4,       // the newest notice was read and may be replaced
  kGoodbye = 5,          // last message on this rail
  kWrittenDirectly = 6,  // as kSegment, with the payload in the receiver's region
  kAlike = 7,            // as kSegment, with the header of this rail's last segment
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

// The data that a peer needs to write to this rank, one struct per rail. The bootstrap exchanges
// them.
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

// The data that a peer needs to write payloads into a part of this rank's region: Regions::grant().
struct Grant {
  std::uint64_t magic = kMagic;
  std::uint64_t address = 0;                     // address of the part's first byte
  std::uint64_t bytes = 0;                       // length of the part
  std::array<std::uint32_t, kRailsMax> rkeys{};  // by rail; 0 for unused entries

  static constexpr std::uint64_t kMagic = 0x0001'746e'6172'4750;  // "PGrant", version 1
};
static_assert(sizeof(Grant) == 40 && std::has_unique_object_representations_v<Grant>);

}  // namespace pycoll::transport::verbs
