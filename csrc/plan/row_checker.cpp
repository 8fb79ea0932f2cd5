#include "plan/row_checker.h"

#include <algorithm>

#include "plan/layout.h"
#include "plan/violation.h"

namespace pycoll::plan {

Status RowChecker::check(const Row& row, std::size_t index) {
  index_ = index;
  Status status = check_scalars(row);
  if (status.ok()) status = check_meaning(row);
  if (status.ok()) status = check_codes(row);
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
  if (row.copies > static_cast<std::uint8_t>(CopyStrategy::kSplit)) {
    return violation(place(), "copies", row.copies, at_most(2));
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

// Whether the row sends from memory that no other tile uses. A row with receive channels sends from
// its target, other rows send from their source.
bool RowChecker::has_lasting_memory(const Row& row) {
  const auto buffer = static_cast<Buffer>(row.recv_count != 0 ? row.target : row.source);
  return buffer == Buffer::kInput || buffer == Buffer::kOutput;
}

// Whether the row only copies one received segment to the output.
bool RowChecker::copies_to_output(const Row& row) {
  return row.recv_count == 1 && operand_count(row) == 1 &&
         static_cast<Buffer>(row.target) == Buffer::kOutput;
}

// Checks the combinations of operands, results and flags.
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
  if ((row.flags & kFlagZeroCopy) != 0 && (row.send_count == 0 || !has_lasting_memory(row))) {
    return violation(place(), "flags", row.flags,
                     "without zero_copy (4), this row sends no input or output in place");
  }
  if (row.copies != 0 && (token || row.send_count == 0)) {
    return violation(place(), "copies", row.copies, "0, this row sends no data");
  }
  if ((row.flags & kFlagAwaitWindow) != 0 && (row.recv_count != 0 || row.copies == 0)) {
    return violation(place(), "flags", row.flags,
                     "without await_window (16), this row receives or leaves copies to receivers");
  }
  if ((row.flags & kFlagAnnounceWindow) != 0 && row.recv_count == 0) {
    return violation(place(), "flags", row.flags,
                     "without announce_window (32), this row receives nothing");
  }
  if ((row.flags & kFlagDirectWrite) != 0 && !copies_to_output(row)) {
    return violation(
        place(), "flags", row.flags,
        "without direct_write (8), this row does more than copy a segment to the output");
  }
  return Status();
}

Status RowChecker::check_mask(std::string_view field, std::uint8_t mask, std::uint8_t used,
                              std::string_view ports) const {
  if (mask < 1u << used) return Status();
  return violation(place(), field, mask,
                   "below 2^" + std::to_string(used) + ", a bit for each of the " +
                       std::string(ports) + " channels");
}

// Checks which operands and results are codes. The results of a row are codes only if the row
// encodes them or passes on the codes of its only operand.
Status RowChecker::check_codes(const Row& row) const {
  if (row.coded_local > kCodedAll) {
    return violation(place(), "coded_local", row.coded_local, at_most(kCodedAll));
  }
  if (!is_coded(row)) return Status();
  if (row.chunk == kToken) {
    const unsigned codes = row.coded_recv | row.coded_send | row.coded_local;
    return violation(place(), "coded_recv | coded_send | coded_local", codes, "0 in a token");
  }
  Status status = check_mask("coded_recv", row.coded_recv, row.recv_count, "receive");
  if (status.ok()) status = check_mask("coded_send", row.coded_send, row.send_count, "send");
  if (!status.ok()) return status;
  if ((row.coded_local & kCodedSource) != 0 && static_cast<Buffer>(row.source) != Buffer::kScratch)
    return violation(place(), "coded_local", row.coded_local,
                     "without 1, the source is no scratch");
  if ((row.coded_local & kCodedTarget) != 0 && static_cast<Buffer>(row.target) != Buffer::kScratch)
    return violation(place(), "coded_local", row.coded_local,
                     "without 2, the target is no scratch");
  const bool encodes = (row.coded_local & kEncode) != 0;
  if (encodes && passes_codes(row)) {
    return violation(place(), "coded_local", row.coded_local, "without 4, its operand is codes");
  }
  if (encodes && row.target == 0 && row.send_count == 0) {
    return violation(place(), "coded_local", row.coded_local, "without 4, the row has no result");
  }
  const bool makes_codes = row.coded_send != 0 || (row.coded_local & kCodedTarget) != 0;
  if (makes_codes && !encodes && !passes_codes(row)) {
    return violation(place(), "coded_local", row.coded_local, "with 4, its results are codes");
  }
  constexpr std::uint8_t kInPlace = kFlagZeroCopy | kFlagDirectWrite | kFlagAwaitWindow;
  if ((row.flags & kInPlace) != 0) {
    return violation(place(), "flags", row.flags,
                     "without 4, 8 and 16, codes are neither read nor written in place");
  }
  if (row.copies != 0) return violation(place(), "copies", row.copies, "0 in a row with codes");
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
  return check_written("source_slot", slot, (row.coded_local & kCodedSource) != 0, row);
}

Status RowChecker::check_carry(const Row& row) const {
  return row.carry == 0 ? Status() : check_written("carry - 1", row.carry - 1u, false, row);
}

Status RowChecker::check_written(std::string_view field, std::uint32_t slot, bool coded,
                                 const Row& row) const {
  if (slot >= header_.scratch_slots) {
    return violation(place(), field, slot, below("scratch_slots", header_.scratch_slots));
  }
  if (slot_lane_[slot] != row.lane) {
    return violation(
        place(), field, slot,
        "a scratch slot that an earlier row of lane " + std::to_string(row.lane) + " wrote");
  }
  if (slot_coded_[slot] != coded) {
    return violation(place(), field, slot,
                     coded ? "a scratch slot that holds codes" : "a scratch slot without codes");
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
  slot_coded_[slot] = (row.coded_local & kCodedTarget) != 0;
  return Status();
}

}  // namespace pycoll::plan
