#include "plan/validate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32.h"
#include "plan/layout.h"

namespace pycoll::plan {
namespace {

constexpr std::size_t kChecksumOffset = offsetof(Header, checksum);

Status violation(const std::string& place, std::string_view field, std::uint64_t value,
                 const std::string& bound) {
  return Status::error(Code::kInvalidArgument,
                       "plan: " + place + ": " + std::string(field) + " is " +
                           std::to_string(value) + ", must be " + bound +
                           "; the plan is damaged or made by another version, lower it again");
}

std::string below(std::string_view field, std::uint64_t bound) {
  return "below " + std::string(field) + ", which is " + std::to_string(bound);
}

std::string at_most(std::uint64_t bound) { return "at most " + std::to_string(bound); }

std::string entry(std::string_view field, std::size_t index) {
  return std::string(field) + "[" + std::to_string(index) + "]";
}

std::uint32_t checksum_of(std::span<const std::byte> bytes) {
  constexpr std::array<std::byte, sizeof(Header::checksum)> kZero{};
  const std::uint32_t head = crc32(kZero, crc32(bytes.first(kChecksumOffset)));
  return crc32(bytes.subspan(sizeof(Header)), head);
}

// Everything that must hold before the tables may be looked at.
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
    return violation("header", "version", header.version, std::to_string(kVersion));
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
  if (header.root != 0 && !rooted(collective)) {
    return violation("header", "root", header.root,
                     "0, " + std::string(name_of(collective)) + " has no root");
  }
  return Status();
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

// Walks the rows in order and remembers what earlier rows decided: which lane a channel belongs to
// and which lane wrote a scratch slot last.
class RowChecker {
 public:
  RowChecker(const Header& header, std::span<const Channel> channels)
      : header_(header),
        channels_(channels),
        data_chunks_(std::uint64_t{header.block_count} * header.parts),
        channel_lane_(channels.size(), kUnused),
        slot_lane_(header.scratch_slots, kUnused) {}

  Status check(const Row& row, std::size_t index);

 private:
  static constexpr std::uint8_t kUnused = 0xff;

  std::string place() const { return "row " + std::to_string(index_); }
  Status check_scalars(const Row& row) const;
  Status check_meaning(const Row& row) const;
  Status check_ports(const Row& row, std::string_view field, std::span<const std::uint16_t> ports,
                     std::uint8_t used, Direction direction);
  Status check_source(const Row& row) const;
  Status check_carry(const Row& row) const;
  Status check_written(std::string_view field, std::uint32_t slot, const Row& row) const;
  Status check_target(const Row& row);
  Status check_place(std::string_view field, std::uint32_t chunk, Buffer buffer) const;

  const Header& header_;
  std::span<const Channel> channels_;
  std::uint64_t data_chunks_;
  std::vector<std::uint8_t> channel_lane_;
  std::vector<std::uint8_t> slot_lane_;
  std::size_t index_ = 0;
  std::uint8_t lane_ = 0;  // of the row before
};

Status RowChecker::check(const Row& row, std::size_t index) {
  index_ = index;
  Status status = check_scalars(row);
  if (status.ok()) status = check_meaning(row);
  if (status.ok()) status = check_ports(row, "recv", row.recv, row.recv_count, Direction::kRecv);
  if (status.ok()) status = check_ports(row, "send", row.send, row.send_count, Direction::kSend);
  if (status.ok()) status = check_source(row);
  if (status.ok()) status = check_carry(row);
  if (status.ok()) status = check_target(row);
  lane_ = row.lane;
  return status;
}

Status RowChecker::check_scalars(const Row& row) const {
  if (row.chunk != kToken && row.chunk >= data_chunks_) {
    return violation(place(), "chunk", row.chunk,
                     "a token or " + below("the number of data chunks", data_chunks_));
  }
  if (row.lane >= header_.lane_count) {
    return violation(place(), "lane", row.lane, below("lane_count", header_.lane_count));
  }
  if (row.lane < lane_) {
    return violation(place(), "lane", row.lane,
                     "at least " + std::to_string(lane_) + " as in the row before");
  }
  if (row.recv_count > kRecvMax) {
    return violation(place(), "recv_count", row.recv_count, at_most(kRecvMax));
  }
  if (row.send_count > kSendMax) {
    return violation(place(), "send_count", row.send_count, at_most(kSendMax));
  }
  if (row.flags > kFlagsAll) return violation(place(), "flags", row.flags, at_most(kFlagsAll));
  if (row.source > static_cast<std::uint8_t>(Buffer::kScratch)) {
    return violation(place(), "source", row.source, at_most(3));
  }
  const bool has_source = row.source != static_cast<std::uint8_t>(Buffer::kNone);
  if (row.source_position > (has_source ? row.recv_count : 0)) {
    return violation(
        place(), "source_position", row.source_position,
        has_source ? at_most(row.recv_count) + ", the receive channels" : "0 without a source");
  }
  if (row.target > static_cast<std::uint8_t>(Buffer::kScratch) ||
      row.target == static_cast<std::uint8_t>(Buffer::kInput)) {
    return violation(place(), "target", row.target, "0 (none), 2 (output) or 3 (scratch)");
  }
  for (std::size_t i = 0; i < std::size(row.reserved); ++i) {
    if (row.reserved[i] != 0) {
      return violation(place(), entry("reserved", i), row.reserved[i], "0");
    }
  }
  if (row.carry != 0 && row.recv_count == 0) {
    return violation(place(), "carry", row.carry, "0 without receive channels");
  }
  return Status();
}

// Which combinations of operands, results and flags make sense at all.
Status RowChecker::check_meaning(const Row& row) const {
  const bool token = row.chunk == kToken;
  const bool reducing = reduces(static_cast<Collective>(header_.collective));
  const auto name = std::string(name_of(static_cast<Collective>(header_.collective)));
  const int operands = operand_count(row);
  if (token && row.source != 0) return violation(place(), "source", row.source, "0 in a token");
  if (token && row.carry != 0) return violation(place(), "carry", row.carry, "0 in a token");
  if (token && row.target != 0) return violation(place(), "target", row.target, "0 in a token");
  if (token && row.flags != 0) return violation(place(), "flags", row.flags, "0 in a token");
  if (!token && operands == 0) {
    return violation(place(), "recv_count", row.recv_count, "at least 1 without a source");
  }
  if (!token && operands > kOperandsMax) {
    return violation(place(), "recv_count", row.recv_count,
                     at_most(kOperandsMax) + " together with source and carry");
  }
  if (row.target == 0 && row.send_count == 0 && row.recv_count == 0) {
    return violation(place(), "send_count", row.send_count,
                     "at least 1 without a target and receive channels");
  }
  if (!token && operands > 1 && !reducing) {
    return violation(place(), "recv_count", row.recv_count,
                     "so that there is one operand, " + name + " combines nothing");
  }
  if ((row.flags & kFlagFinal) != 0 && (operands < 2 || !reducing)) {
    return violation(place(), "flags", row.flags,
                     "without final (1), this row of " + name + " combines nothing");
  }
  return Status();
}

Status RowChecker::check_ports(const Row& row, std::string_view field,
                               std::span<const std::uint16_t> ports, std::uint8_t used,
                               Direction direction) {
  for (std::size_t i = 0; i < ports.size(); ++i) {
    const std::uint16_t port = ports[i];
    if (i >= used) {
      if (port == kNoChannel) continue;
      return violation(
          place(), entry(field, i), port,
          "65535 (unused) as " + std::string(field) + "_count is " + std::to_string(used));
    }
    if (port >= channels_.size()) {
      return violation(place(), entry(field, i), port, below("channel_count", channels_.size()));
    }
    if (channels_[port].direction != static_cast<std::uint8_t>(direction)) {
      return violation(place(), entry(field, i), port,
                       direction == Direction::kRecv ? "a receive channel" : "a send channel");
    }
    const auto before = ports.first(i);
    if (std::find(before.begin(), before.end(), port) != before.end()) {
      return violation(place(), entry(field, i), port, "used once in the row");
    }
    std::uint8_t& lane = channel_lane_[port];
    if (lane != kUnused && lane != row.lane) {
      return violation(place(), entry(field, i), port,
                       "used by one lane only; lanes " + std::to_string(lane) + " and " +
                           std::to_string(row.lane) + " do");
    }
    lane = row.lane;
  }
  return Status();
}

Status RowChecker::check_place(std::string_view field, std::uint32_t chunk, Buffer buffer) const {
  if (chunk >= data_chunks_) {
    return violation(place(), field, chunk, below("the number of data chunks", data_chunks_));
  }
  const std::uint32_t block = chunk / header_.parts;
  const bool input = buffer == Buffer::kInput;
  if (!(input ? holds_input(header_, block) : holds_output(header_, block))) {
    return violation(place(), field, chunk,
                     std::string("a chunk in the ") + (input ? "input" : "output") + " of rank " +
                         std::to_string(header_.rank) + ", which lacks block " +
                         std::to_string(block));
  }
  return Status();
}

Status RowChecker::check_source(const Row& row) const {
  const auto buffer = static_cast<Buffer>(row.source);
  const std::uint32_t slot = row.source_slot;
  if (buffer == Buffer::kNone) {
    return slot == 0 ? Status() : violation(place(), "source_slot", slot, "0 without a source");
  }
  if (buffer != Buffer::kScratch) return check_place("source_slot", slot, buffer);
  return check_written("source_slot", slot, row);
}

Status RowChecker::check_carry(const Row& row) const {
  return row.carry == 0 ? Status() : check_written("carry - 1", row.carry - 1u, row);
}

Status RowChecker::check_written(std::string_view field, std::uint32_t slot, const Row& row) const {
  if (slot >= header_.scratch_slots) {
    return violation(place(), field, slot, below("scratch_slots", header_.scratch_slots));
  }
  if (slot_lane_[slot] != row.lane) {
    return violation(
        place(), field, slot,
        "a scratch slot that an earlier row of lane " + std::to_string(row.lane) + " wrote");
  }
  return Status();
}

Status RowChecker::check_target(const Row& row) {
  const auto buffer = static_cast<Buffer>(row.target);
  const std::uint32_t slot = row.target_slot;
  if (buffer == Buffer::kNone) {
    return slot == 0 ? Status() : violation(place(), "target_slot", slot, "0 without a target");
  }
  if (buffer != Buffer::kScratch) return check_place("target_slot", slot, buffer);
  if (slot >= header_.scratch_slots) {
    return violation(place(), "target_slot", slot, below("scratch_slots", header_.scratch_slots));
  }
  slot_lane_[slot] = row.lane;
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
