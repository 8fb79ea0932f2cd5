// The layout of channels in a rank's channel memory, which peers write to. All ranks compute the
// same layout from the same shape, so they exchange base addresses only.
//
// Channel memory holds, for each peer, channel number, share and protocol:
//   headers and slots   written by that peer, read by the rank
//   credit              written by that peer: how many of the rank's segments it has released
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/kernels/program.h"

namespace pycoll::device {

// The channel number of messages; collectives use the numbers below.
inline constexpr std::uint32_t kMessageNumber = 4;

// The dimensions of the channels of a rank; equal on all ranks of a communicator.
struct Shape {
  std::uint32_t size = 1;     // ranks
  std::uint32_t numbers = 1;  // channel numbers that plans use
  std::uint32_t shares = 1;   // the most shares of a program
  // Payload of one segment in bytes, by protocol. Small messages need many small segments in
  // flight, large messages few barriers per byte.
  std::array<std::uint32_t, kProtocolCount> segment_bytes{8 * 1024, 30 * 1024, 64 * 1024, 8 * 1024};
};

// Channels get smaller by level, where there is less memory; the last level has the smallest.
inline constexpr std::uint32_t kLevels = 7;
// The shape for `size` ranks with `blocks` blocks each. `proxied`: some ranks use the host proxy.
// `only`: the protocol of all collectives, if it is set. Channels of unused protocols are the
// smallest.
Shape shape_at(std::uint32_t size, std::uint32_t blocks, std::uint32_t level, bool proxied,
               std::optional<Protocol> only);

// kInvalidArgument names the field that is out of its bounds.
Status check(const Shape& shape);

// Bytes from one slot to the next, for segments of this payload. Requires: a checked shape.
std::uint32_t slot_stride(const Shape& shape, Protocol protocol);
// Bytes of one rank's channel memory. It must be zeroed before first use, and aligned to
// kGranuleBytes.
std::uint64_t channel_memory_bytes(const Shape& shape);

// The entry of make_ports() for that end of a channel. Requires: all below the shape's bounds.
std::uint32_t port_index(const Shape& shape, Protocol protocol, std::uint32_t peer,
                         std::uint32_t number, plan::Direction direction, std::uint32_t share);
// All ports of `rank`, with steps of zero, ready for one copy to its device memory. `bases` are the
// addresses of all ranks' channel memory as this rank sees them, nullptr for ranks out of reach.
// Ports to those and to the rank itself point nowhere.
std::vector<Port> make_ports(const Shape& shape, std::uint32_t rank,
                             std::span<std::byte* const> bases);
// The offset in channel memory of the bytes that `peer` writes in one protocol, and their number.
std::uint64_t share_of_peer(const Shape& shape, Protocol protocol, std::uint32_t peer);
std::uint64_t share_bytes(const Shape& shape, Protocol protocol);

// One end of a channel, in channel memory or in memory of the host proxy.
struct End {
  Pack* headers;          // kDepth
  std::uint64_t* credit;  // shares a line with `window` only
  WriteWindow* window;
  std::byte* slots;  // kDepth
};
End end_at(std::byte* memory);

// Memory of the channels to one peer that use the host proxy (host_proxy/proxy.h), in
// Protocol::kSimple only. Headers and credits of both directions, the words, lie in host memory
// that is mapped for kernels. The slots of each direction are a piece of their own, in host or
// device memory.
struct ProxiedMemory {
  std::byte* words = nullptr;         // proxied_word_bytes(), zeroed
  std::array<std::byte*, 2> slots{};  // proxied_slot_bytes() each, by plan::Direction
};
std::uint64_t proxied_word_bytes(const Shape& shape);
std::uint64_t proxied_slot_bytes(const Shape& shape);
// The offset of a channel's slots among those of its direction; the same at both ends.
std::uint64_t proxied_slots_at(const Shape& shape, std::uint32_t number, std::uint32_t share);
End proxied_end(const Shape& shape, const ProxiedMemory& memory, std::uint32_t number,
                plan::Direction direction, std::uint32_t share);
// Points the ports of `peer` to its memory, as kernels see it.
void point_proxied_ports(const Shape& shape, std::uint32_t peer, const ProxiedMemory& memory,
                         std::span<Port> ports);

}  // namespace pycoll::device
