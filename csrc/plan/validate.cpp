#include "plan/validate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "base/crc32.h"
#include "plan/layout.h"
#include "plan/row_checker.h"
#include "plan/violation.h"

namespace pycoll::plan {
namespace {

constexpr std::size_t kChecksumOffset = offsetof(Header, checksum);

std::uint32_t checksum_of(std::span<const std::byte> bytes) {
  constexpr std::array<std::byte, sizeof(Header::checksum)> kZero{};
  const std::uint32_t head = crc32(kZero, crc32(bytes.first(kChecksumOffset)));
  return crc32(bytes.subspan(sizeof(Header)), head);
}

// Checks everything that the table accesses depend on: alignment, lengths, counts, checksum.
Status check_frame(std::span<const std::byte> bytes) {
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(Header) != 0) {
    return violation("bytes", "address modulo 4",
                     reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(Header),
                     "0 (copy the plan to aligned memory)");
  }
  if (bytes.size() < sizeof(Header)) {
    return violation("bytes", "length", bytes.size(), "at least 64, a header");
  }
  const auto& header = *reinterpret_cast<const Header*>(bytes.data());
  if (header.magic != kMagic) {
    return violation("header", "magic", header.magic, std::to_string(kMagic) + " (\"PCPL\")");
  }
  if (header.version != kVersion) {
    return violation("header", "version", header.version,
                     std::to_string(kVersion) + " (lower the schedule again)");
  }
  if (header.channel_count > kChannelEntriesMax) {
    return violation("header", "channel_count", header.channel_count, at_most(kChannelEntriesMax));
  }
  if (header.row_count > kRowsMax) {
    return violation("header", "row_count", header.row_count, at_most(kRowsMax));
  }
  const std::uint64_t length = sizeof(Header) +
                               std::uint64_t{header.channel_count} * sizeof(Channel) +
                               std::uint64_t{header.row_count} * sizeof(Row);
  if (bytes.size() != length) {
    return violation("bytes", "length", bytes.size(),
                     std::to_string(length) + " for " + std::to_string(header.channel_count) +
                         " channels and " + std::to_string(header.row_count) + " rows");
  }
  if (const std::uint32_t expected = checksum_of(bytes); header.checksum != expected) {
    return violation("header", "checksum", header.checksum, std::to_string(expected));
  }
  return Status();
}

// Servers neither contribute nor receive. Only collectives of one block take servers; their block
// count is 1 for every size, such as 2. Requires: a valid collective, size and root.
Status check_servers(const Header& header, Collective collective) {
  if (header.servers == 0) return Status();
  if (header.servers >= header.size) {
    return violation("header", "servers", header.servers, below("size", header.size));
  }
  if (block_count(collective, 2) != 1) {
    return violation("header", "servers", header.servers,
                     "0, " + std::string(name_of(collective)) + " takes no servers");
  }
  if (header.root >= workers(header)) {
    return violation("header", "root", header.root,
                     below("the number of workers", workers(header)));
  }
  return Status();
}

Status check_ranks(const Header& header) {
  if (header.collective >= kCollectiveCount) {
    return violation("header", "collective", header.collective, at_most(kCollectiveCount - 1));
  }
  if (header.lane_count < 1 || header.lane_count > kLanesMax) {
    return violation("header", "lane_count", header.lane_count, "1 to 7");
  }
  if (header.size < 1 || header.size > kSizeMax) {
    return violation("header", "size", header.size, "1 to " + std::to_string(kSizeMax));
  }
  if (header.rank >= header.size) {
    return violation("header", "rank", header.rank, below("size", header.size));
  }
  if (header.root >= header.size) {
    return violation("header", "root", header.root, below("size", header.size));
  }
  const auto collective = static_cast<Collective>(header.collective);
  if (header.root != 0 && !has_root(collective)) {
    return violation("header", "root", header.root,
                     "0, " + std::string(name_of(collective)) + " has no root");
  }
  return check_servers(header, collective);
}

// Requires: check_ranks passed.
Status check_chunks(const Header& header) {
  const auto collective = static_cast<Collective>(header.collective);
  const std::uint64_t blocks = block_count(collective, header.size);
  if (header.block_count != blocks) {
    return violation("header", "block_count", header.block_count,
                     std::to_string(blocks) + " for " + std::string(name_of(collective)) + " of " +
                         std::to_string(header.size) + " ranks");
  }
  if (header.parts < 1) return violation("header", "parts", header.parts, "at least 1");
  const std::uint64_t chunks = blocks * header.parts;
  if (chunks >= kToken) {
    return violation("header", "parts", header.parts,
                     "at most " + std::to_string((kToken - 1) / blocks) + " for " +
                         std::to_string(blocks) + " blocks (chunk numbers have 32 bits)");
  }
  if (chunks + header.temporary_count >= kToken) {
    return violation("header", "temporary_count", header.temporary_count,
                     at_most(kToken - 1 - chunks) + " behind " + std::to_string(chunks) +
                         " data chunks (chunk numbers have 32 bits)");
  }
  if (header.scratch_slots > kScratchSlotsMax) {
    return violation("header", "scratch_slots", header.scratch_slots, at_most(kScratchSlotsMax));
  }
  for (std::size_t i = 0; i < std::size(header.reserved); ++i) {
    if (header.reserved[i] != 0) {
      return violation("header", entry("reserved", i), header.reserved[i], "0");
    }
  }
  return Status();
}

Status check_channel(const Header& header, const Channel& channel, std::size_t index) {
  const std::string place = "channel " + std::to_string(index);
  if (channel.peer >= header.size) {
    return violation(place, "peer", channel.peer, below("size", header.size));
  }
  if (channel.peer == header.rank) {
    return violation(place, "peer", channel.peer, "another rank than the plan's own");
  }
  if (channel.number > kChannelNumberMax) {
    return violation(place, "number", channel.number, at_most(kChannelNumberMax));
  }
  if (channel.direction > static_cast<std::uint8_t>(Direction::kSend)) {
    return violation(place, "direction", channel.direction, "0 (receive) or 1 (send)");
  }
  if (channel.reserved != 0) return violation(place, "reserved", channel.reserved, "0");
  return Status();
}

std::uint64_t key_of(const Channel& channel) {
  return std::uint64_t{channel.peer} << 32 | std::uint64_t{channel.number} << 8 | channel.direction;
}

Status check_channels(const Header& header, std::span<const Channel> channels) {
  for (std::size_t index = 0; index < channels.size(); ++index) {
    Status status = check_channel(header, channels[index], index);
    if (!status.ok()) return status;
  }
  std::vector<std::uint32_t> order(channels.size());
  for (std::uint32_t index = 0; index < order.size(); ++index) order[index] = index;
  const auto key = [&](std::uint32_t index) { return key_of(channels[index]); };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (key(order[i]) == key(order[i - 1])) {
      return violation("channel " + std::to_string(order[i]), "peer", channels[order[i]].peer,
                       "listed once per number and direction, but channel " +
                           std::to_string(order[i - 1]) + " is the same");
    }
  }
  return Status();
}

}  // namespace

Status validate(std::span<const std::byte> bytes, Plan* plan) {
  Status status = check_frame(bytes);
  if (!status.ok()) return status;
  const auto& header = *reinterpret_cast<const Header*>(bytes.data());
  const std::byte* cursor = bytes.data() + sizeof(Header);
  const std::span channels(reinterpret_cast<const Channel*>(cursor), header.channel_count);
  cursor += channels.size_bytes();
  const std::span rows(reinterpret_cast<const Row*>(cursor), header.row_count);
  status = check_ranks(header);
  if (status.ok()) status = check_chunks(header);
  if (status.ok()) status = check_channels(header, channels);
  if (!status.ok()) return status;
  RowChecker checker(header, channels);
  for (std::size_t index = 0; index < rows.size(); ++index) {
    status = checker.check(rows[index], index);
    if (!status.ok()) return status;
  }
  *plan = Plan{&header, channels, rows};
  return status;
}

}  // namespace pycoll::plan
