#include "device/memory/channel_memory.h"

#include <algorithm>
#include <string>

#include "base/assert.h"
#include "base/bytes.h"
#include "device/kernels/protocols.h"
#include "plan/validate.h"
#include "transport/transport.h"

namespace pycoll::device {
namespace {

// Limits that keep 32-bit port indices and the bytes of one end from overflowing.
constexpr std::uint32_t kSizeMax = 1024;
constexpr std::uint32_t kSharesMax = 256;
constexpr std::uint64_t kHeaderBytes = round_up(kDepth * sizeof(Pack), kGranuleBytes);
// A line of its own: the peer writes it while this rank writes credits elsewhere.
constexpr std::uint64_t kCreditBytes = kGranuleBytes;
static_assert(kPackBytes + sizeof(WriteWindow) <= kCreditBytes);

// Channel numbers that schedules use between two ranks (the tree's four in both directions), and
// the channel number of messages.
constexpr std::uint32_t kNumbers = kMessageNumber + 1;
constexpr std::uint32_t kSharesWanted = 32;
// Fewer shares keep a network as busy, and slots take pinned memory.
constexpr std::uint32_t kSharesProxied = 8;
// Of one rank: all peers, numbers and shares together.
constexpr std::uint32_t kChannelsMax = 320;
constexpr std::uint32_t kSegmentBytesMin = 1024;

static_assert(kDepth == transport::kChannelDepth, "plans are proved for channels of that depth");
static_assert(transport::kSegmentBytesMax <= kLengthMask, "headers tell the length of segments");

std::uint64_t end_bytes(const Shape& shape, Protocol protocol) {
  return kHeaderBytes + kCreditBytes + std::uint64_t{kDepth} * slot_stride(shape, protocol);
}

std::uint64_t channels(const Shape& shape) {
  return std::uint64_t{shape.size} * shape.numbers * shape.shares;
}

// Bytes of all ends of the first `count` protocols, which lie one after the other.
std::uint64_t bytes_of_protocols(const Shape& shape, std::uint32_t count) {
  std::uint64_t bytes = 0;
  for (std::uint32_t protocol = 0; protocol < count; ++protocol) {
    bytes += channels(shape) * end_bytes(shape, static_cast<Protocol>(protocol));
  }
  return bytes;
}

// The offset of the end for `peer` in its rank's channel memory.
std::uint64_t end_offset(const Shape& shape, Protocol protocol, std::uint32_t peer,
                         std::uint32_t number, std::uint32_t share) {
  const std::uint64_t index = (std::uint64_t{peer} * shape.numbers + number) * shape.shares + share;
  return bytes_of_protocols(shape, static_cast<std::uint32_t>(protocol)) +
         index * end_bytes(shape, protocol);
}

Status out_of_range(const std::string& name, std::uint64_t value, std::uint64_t low,
                    std::uint64_t high) {
  return Status::error(Code::kInvalidArgument, "device: " + name + " is " + std::to_string(value) +
                                                   ", allowed are " + std::to_string(low) + " to " +
                                                   std::to_string(high));
}

}  // namespace

// Every level has half the segment bytes and half the shares of the level before.
Shape shape_at(std::uint32_t size, std::uint32_t blocks, std::uint32_t level, bool proxied,
               std::optional<Protocol> only) {
  Shape shape;
  shape.size = size;
  shape.numbers = kNumbers;
  const std::uint32_t wanted = proxied ? kSharesProxied : kSharesWanted;
  const std::uint32_t ends = std::max(1u, size) * kNumbers;  // check() refuses a size of 0
  const std::uint32_t shares = std::min({wanted, kChannelsMax / ends, blocks});
  shape.shares = std::max(1u, shares >> level);
  for (std::uint32_t i = 0; i < kProtocolCount; ++i) {
    const auto protocol = static_cast<Protocol>(i);
    std::uint32_t& bytes = shape.segment_bytes[i];
    bytes = std::max(kSegmentBytesMin, bytes >> level);
    // Messages and large operations use Simple, even where `only` names another protocol.
    const bool is_used = protocol == only.value_or(Protocol::kPattern);
    if (!is_used && protocol != Protocol::kSimple) bytes = kPackBytes;
  }
  return shape;
}

Status check(const Shape& shape) {
  if (shape.size < 1 || shape.size > kSizeMax) return out_of_range("size", shape.size, 1, kSizeMax);
  if (shape.numbers < 1 || shape.numbers > plan::kChannelNumberMax + 1) {
    return out_of_range("numbers", shape.numbers, 1, plan::kChannelNumberMax + 1);
  }
  if (shape.shares < 1 || shape.shares > kSharesMax) {
    return out_of_range("shares", shape.shares, 1, kSharesMax);
  }
  for (std::uint32_t i = 0; i < kProtocolCount; ++i) {
    const std::uint32_t bytes = shape.segment_bytes[i];
    if (bytes < kPackBytes || bytes > transport::kSegmentBytesMax) {
      return out_of_range("segment_bytes[" + std::to_string(i) + "]", bytes, kPackBytes,
                          transport::kSegmentBytesMax);
    }
  }
  return Status();
}

std::uint32_t slot_stride(const Shape& shape, Protocol protocol) {
  const std::uint32_t bytes = shape.segment_bytes[static_cast<std::size_t>(protocol)];
  std::uint64_t wire = bytes;
  if (protocol == Protocol::kLl) wire = div_ceil(bytes, kPackBytes) * Ll::kUnitBytes;
  if (protocol == Protocol::kLl128) wire = div_ceil(bytes, Ll128::kLineBytesMin) * kGranuleBytes;
  if (protocol == Protocol::kPattern) wire = Pattern::kParts * round_up(wire, kGranuleBytes);
  return static_cast<std::uint32_t>(round_up(wire, kGranuleBytes));
}

std::uint64_t channel_memory_bytes(const Shape& shape) {
  return bytes_of_protocols(shape, kProtocolCount);
}

std::uint32_t port_index(const Shape& shape, Protocol protocol, std::uint32_t peer,
                         std::uint32_t number, plan::Direction direction, std::uint32_t share) {
  PYCOLL_ASSERT(peer < shape.size && number < shape.numbers && share < shape.shares,
                "peer %u, number %u, share %u", peer, number, share);
  std::uint32_t index = static_cast<std::uint32_t>(protocol);
  index = index * 2 + static_cast<std::uint32_t>(direction);
  index = index * shape.size + peer;
  index = index * shape.numbers + number;
  return index * shape.shares + share;
}

std::vector<Port> make_ports(const Shape& shape, std::uint32_t rank,
                             std::span<std::byte* const> bases) {
  PYCOLL_ASSERT(bases.size() == shape.size && rank < shape.size, "%zu bases, rank %u", bases.size(),
                rank);
  std::vector<Port> ports(2 * kProtocolCount * channels(shape));
  // The end for `peer` in the channel memory of `owner`.
  const auto end = [&](Protocol protocol, std::uint32_t owner, std::uint32_t peer,
                       std::uint32_t number, std::uint32_t share) {
    return bases[owner] + end_offset(shape, protocol, peer, number, share);
  };
  for (std::uint32_t index = 0; index < ports.size(); ++index) {
    std::uint32_t rest = index;
    const std::uint32_t share = rest % shape.shares;
    rest /= shape.shares;
    const std::uint32_t number = rest % shape.numbers;
    rest /= shape.numbers;
    const std::uint32_t peer = rest % shape.size;
    rest /= shape.size;
    const auto protocol = static_cast<Protocol>(rest / 2);
    if (peer == rank || bases[peer] == nullptr) continue;
    const bool sends = static_cast<plan::Direction>(rest % 2) == plan::Direction::kSend;
    std::byte* mine = end(protocol, rank, peer, number, share);
    std::byte* theirs = end(protocol, peer, rank, number, share);
    const End inbox = end_at(sends ? theirs : mine);
    const End outbox = end_at(sends ? mine : theirs);
    ports[index] = {inbox.slots, inbox.headers, outbox.credit, outbox.window, 0, 0, peer, 0};
  }
  return ports;
}

std::uint64_t share_of_peer(const Shape& shape, Protocol protocol, std::uint32_t peer) {
  return end_offset(shape, protocol, peer, 0, 0);
}

std::uint64_t share_bytes(const Shape& shape, Protocol protocol) {
  return std::uint64_t{shape.numbers} * shape.shares * end_bytes(shape, protocol);
}

End end_at(std::byte* memory) {
  return {reinterpret_cast<Pack*>(memory), reinterpret_cast<std::uint64_t*>(memory + kHeaderBytes),
          reinterpret_cast<WriteWindow*>(memory + kHeaderBytes + kPackBytes),
          memory + kHeaderBytes + kCreditBytes};
}

std::uint64_t proxied_word_bytes(const Shape& shape) {
  return std::uint64_t{2} * shape.numbers * shape.shares * (kHeaderBytes + kCreditBytes);
}

std::uint64_t proxied_slot_bytes(const Shape& shape) {
  return proxied_slots_at(shape, shape.numbers, 0);
}

std::uint64_t proxied_slots_at(const Shape& shape, std::uint32_t number, std::uint32_t share) {
  const std::uint64_t channel = std::uint64_t{number} * shape.shares + share;
  return channel * kDepth * slot_stride(shape, Protocol::kSimple);
}

End proxied_end(const Shape& shape, const ProxiedMemory& memory, std::uint32_t number,
                plan::Direction direction, std::uint32_t share) {
  const auto way = static_cast<std::uint64_t>(direction);
  const std::uint64_t index = (way * shape.numbers + number) * shape.shares + share;
  End end = end_at(memory.words + index * (kHeaderBytes + kCreditBytes));
  end.slots = memory.slots[way] + proxied_slots_at(shape, number, share);
  return end;
}

void point_proxied_ports(const Shape& shape, std::uint32_t peer, const ProxiedMemory& memory,
                         std::span<Port> ports) {
  for (const auto direction : {plan::Direction::kRecv, plan::Direction::kSend}) {
    for (std::uint32_t number = 0; number < shape.numbers; ++number) {
      for (std::uint32_t share = 0; share < shape.shares; ++share) {
        const End end = proxied_end(shape, memory, number, direction, share);
        ports[port_index(shape, Protocol::kSimple, peer, number, direction, share)] = {
            end.slots, end.headers, end.credit, nullptr, 0, 0, peer, 0};
      }
    }
  }
}

}  // namespace pycoll::device
