#include "plan/print.h"

#include "base/types.h"
#include "plan/layout.h"

namespace pycoll::plan {
namespace {

std::string count_text(std::uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string title(const Header& header) {
  const auto collective = static_cast<Collective>(header.collective);
  std::string text(name_of(collective));
  text += ", rank " + std::to_string(header.rank) + " of " + std::to_string(header.size);
  if (header.servers != 0) text += ", the last " + count_text(header.servers, "rank") + " serving";
  if (has_root(collective)) text += ", root " + std::to_string(header.root);
  text += ", " + count_text(std::uint64_t{header.block_count} * header.parts, "chunk");
  if (header.temporary_count != 0)
    text += ", " + count_text(header.temporary_count, "temporary chunk");
  text += ", " + count_text(header.lane_count, "lane");
  text += ", " + count_text(header.scratch_slots, "scratch slot");
  return text + "\n";
}

std::string place(std::uint8_t buffer, std::uint32_t slot) {
  const char* name = "tmp";
  if (static_cast<Buffer>(buffer) == Buffer::kInput) name = "in";
  if (static_cast<Buffer>(buffer) == Buffer::kOutput) name = "out";
  return std::string(name) + "[" + std::to_string(slot) + "]";
}

std::string port(const Plan& plan, const Row& row, std::uint16_t index) {
  const Channel& channel = plan.channels[index];
  std::string text = std::to_string(channel.peer);
  if (channel.number != row.lane) text += "#" + std::to_string(channel.number);
  return text;
}

void append(std::string* list, const std::string& item, const char* separator) {
  if (!list->empty()) *list += separator;
  *list += item;
}

// "codes " if bit `number` of the mask is set.
std::string codes(std::uint8_t mask, int number) {
  return (mask >> number & 1) != 0 ? "codes " : "";
}

std::string operands(const Plan& plan, const Row& row) {
  std::string list;
  if (row.carry != 0) {
    append(&list, place(static_cast<std::uint8_t>(Buffer::kScratch), row.carry - 1u), " + ");
  }
  for (int i = 0; i <= row.recv_count; ++i) {
    if (row.source != 0 && row.source_position == i) {
      append(&list, codes(row.coded_local, 0) + place(row.source, row.source_slot), " + ");
    }
    if (i < row.recv_count) {
      append(&list, codes(row.coded_recv, i) + "recv " + port(plan, row, row.recv[i]), " + ");
    }
  }
  return list.empty() ? "nothing" : list;
}

std::string results(const Plan& plan, const Row& row) {
  std::string list;
  if (row.target != 0) {
    append(&list, codes(row.coded_local, 1) + place(row.target, row.target_slot), ", ");
  }
  for (int i = 0; i < row.send_count; ++i) {
    append(&list, codes(row.coded_send, i) + "send " + port(plan, row, row.send[i]), ", ");
  }
  return list.empty() ? "nothing" : list;
}

std::string line(const Plan& plan, const Row& row) {
  std::string text = "lane " + std::to_string(row.lane) + ": ";
  text += row.chunk == kToken ? "token: " : "chunk " + std::to_string(row.chunk) + ": ";
  text += operands(plan, row) + " -> " + results(plan, row);
  std::string flags;
  if ((row.flags & kFlagFinal) != 0) append(&flags, "final", ", ");
  if ((row.flags & kFlagFlush) != 0) append(&flags, "flush", ", ");
  if ((row.flags & kFlagZeroCopy) != 0) append(&flags, "zero_copy", ", ");
  if ((row.flags & kFlagDirectWrite) != 0) append(&flags, "direct_write", ", ");
  if ((row.flags & kFlagAwaitWindow) != 0) append(&flags, "await_window", ", ");
  if ((row.flags & kFlagAnnounceWindow) != 0) append(&flags, "announce_window", ", ");
  if ((row.coded_local & kEncode) != 0) append(&flags, "encode", ", ");
  if (row.copies == static_cast<std::uint8_t>(CopyStrategy::kSender)) {
    append(&flags, "sender copies", ", ");
  }
  if (row.copies == static_cast<std::uint8_t>(CopyStrategy::kSplit)) {
    append(&flags, "both copy", ", ");
  }
  if (!flags.empty()) text += " (" + flags + ")";
  return text + "\n";
}

}  // namespace

std::string to_text(const Plan& plan) {
  std::string text = title(*plan.header);
  for (const Row& row : plan.rows) text += line(plan, row);
  return text;
}

}  // namespace pycoll::plan
