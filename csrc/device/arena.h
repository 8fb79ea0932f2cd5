// Where channels lie in the memory that a rank lets its peers write to, and who points where. All
// ranks compute the same places from the same shape, so that they exchange base addresses only.
//
// A rank's arena, for each peer, channel number, share and protocol:
//   headers and slots   written by that peer, read by the rank
//   credit              written by that peer: how many segments of the rank it has given back
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/program.h"

namespace pycoll::device {

// The channel number of messages; collectives use those below.
inline constexpr std::uint32_t kMessageNumber = 4;

// Agreed by all ranks of a communicator.
struct Shape {
  std::uint32_t size = 1;     // ranks
  std::uint32_t numbers = 1;  // channel numbers that plans use
  std::uint32_t shares = 1;   // at most, of a program
  // Payload of one segment by protocol. Small messages want many small segments in flight, large
  // ones few meetings per byte.
  std::array<std::uint32_t, kProtocolCount> segment_bytes{8 * 1024, 30 * 1024, 64 * 1024, 8 * 1024};
};

// Channels become smaller by levels, where there is less memory; at the last one they are smallest.
inline constexpr std::uint32_t kLevels = 7;
// For so many ranks with so many blocks each. `carried`: some of them by the host. `only`: what
// collectives use, if somebody said so; channels of protocols that nobody uses are the smallest.
Shape shape_at(std::uint32_t size, std::uint32_t blocks, std::uint32_t level, bool carried,
               std::optional<Protocol> only);

// kInvalidArgument names the field that is out of its bounds.
Status check(const Shape& shape);

// Bytes from one slot to the next, for segments of this payload. Requires: a checked shape.
std::uint32_t slot_stride(const Shape& shape, Protocol protocol);
// Bytes of one rank's arena; to be zeroed before first use, and aligned to kGranuleBytes.
std::uint64_t arena_bytes(const Shape& shape);

// Which entry of make_ports() is the end of that channel. Requires: all below the shape's bounds.
std::uint32_t port_index(const Shape& shape, Protocol protocol, std::uint32_t peer,
                         std::uint32_t number, plan::Direction direction, std::uint32_t share);
// All ports of `rank`, steps zero, as they are copied to its device memory once; `arenas` are the
// base addresses of all ranks' arenas as this rank sees them, nullptr for those it does not reach.
// Ports to these and to itself point nowhere.
std::vector<Port> make_ports(const Shape& shape, std::uint32_t rank,
                             std::span<std::byte* const> arenas);
// Where in an arena lies what `peer` writes, and how many bytes of one protocol that is.
std::uint64_t share_of_peer(const Shape& shape, Protocol protocol, std::uint32_t peer);
std::uint64_t share_bytes(const Shape& shape, Protocol protocol);

// One end of a channel, as it lies in an arena or in memory that the host carries from.
struct End {
  Pack* headers;          // kDepth
  std::uint64_t* credit;  // a line of its own, together with
  Offer* offer;
  std::byte* slots;  // kDepth
};
End end_at(std::byte* memory);

// Channels to one peer that the host carries (carrier.h), in Protocol::kSimple only. Headers and
// credits of both directions, the words, lie in memory of the host, which is mapped for kernels;
// the slots of each direction are a piece of their own, of the host or of the device.
struct CarriedMemory {
  std::byte* words = nullptr;         // carried_word_bytes(), zeroed
  std::array<std::byte*, 2> slots{};  // carried_slot_bytes() each, by plan::Direction
};
std::uint64_t carried_word_bytes(const Shape& shape);
std::uint64_t carried_slot_bytes(const Shape& shape);
// Where the slots of a channel begin among those of its direction; the same at both ends.
std::uint64_t carried_slots_at(const Shape& shape, std::uint32_t number, std::uint32_t share);
End carried_end(const Shape& shape, const CarriedMemory& memory, std::uint32_t number,
                plan::Direction direction, std::uint32_t share);
// Points the ports of `peer` to its memory, as kernels see it.
void carry_ports(const Shape& shape, std::uint32_t peer, const CarriedMemory& memory,
                 std::span<Port> ports);

}  // namespace pycoll::device
