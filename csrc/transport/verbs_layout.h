// What lies where in the memory that a peer writes into, and what the 32 bits say that come with a
// message: the wire of the verbs transport as structs. VERBS.md is the page.
//
// The sender keeps an area of the same layout, from which it sends: what lies at an offset there
// arrives at the same offset here.
#pragma once

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
  std::uint8_t released[kChannelsMax];  // per channel, as in a TCP frame; see WIRE.md
};
static_assert(sizeof(SlotHeader) == 32 && std::is_trivially_copyable_v<SlotHeader>);

// The header ends where the payload begins, so that both are one stretch of memory and the payload
// is aligned to 64 bytes. Strides are no multiple of 4096: slots would share their cache sets.
inline constexpr std::size_t kHeaderAt = 32;
inline constexpr std::size_t kPayloadAt = kHeaderAt + sizeof(SlotHeader);
inline constexpr std::size_t kSlotStride = kPayloadAt + kSegmentBytesMax + 256;
static_assert(kPayloadAt == 64 && kSlotStride % 64 == 0 && kSlotStride % 4096 != 0);

// Counters of segments may run on: a slot serves every kChannelDepth-th of them.
constexpr std::size_t slot_offset(std::uint32_t channel, std::uint32_t segment) {
  return (channel * kChannelDepth + segment % kChannelDepth) * kSlotStride;
}

// A notice that replaces the one before, and the last one of all, which waits for nothing.
enum class NoticePlace : std::uint8_t { kNewest, kFinal };
inline constexpr std::size_t kNoticesAt = slot_offset(kChannelsMax, 0);
constexpr std::size_t notice_offset(NoticePlace place) {
  return kNoticesAt + static_cast<std::size_t>(place) * sizeof(Notice);
}
inline constexpr std::size_t kAreaBytes = round_up(notice_offset(NoticePlace{2}), 4096);

// The first byte of the immediate value that ends every message.
enum class Kind : std::uint8_t {
  kSegment = 1,     // channel; number of the segment
  kCredit = 2,      // channel; number of segments released
  kNotice = 3,      // place in the second byte; one has been written there
  kNoticeSeen = 4,  // the newest notice was read, and may be replaced
  kGoodbye = 5,     // nothing follows
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

// What a peer must know to write here; exchanged by the bootstrap.
struct PeerAddress {
  std::uint64_t magic = kMagic;
  std::uint64_t area = 0;  // address of the area that the peer may write
  std::uint32_t rkey = 0;
  std::uint32_t pair_number = 0;
  std::uint32_t packet_number = 0;  // of the first packet
  std::uint16_t lid = 0;            // 0 on Ethernet
  std::uint8_t mtu = 0;             // as in ibv_mtu
  std::uint8_t link_layer = 0;      // as in ibv_port_attr
  std::uint8_t gid[16] = {};

  static constexpr std::uint64_t kMagic = 0x0001'7362'7265'5650;  // "PVerbs", version 1
};
static_assert(sizeof(PeerAddress) == 48 && std::has_unique_object_representations_v<PeerAddress>);

}  // namespace pycoll::transport::verbs
