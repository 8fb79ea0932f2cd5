// Device code: direct writes. The sender writes a segment to the receiver's output instead of to a
// slot.
//
//   receiver                                      sender
//   its launch begins; for each channel
//   that brings segments which the
//   receiver only copies to a registered
//   output: writes the window, `begun` last -->   has a free slot for a segment: loads the window
//                                                 once. If it is of this launch, the segment goes
//                                                 to the output, and the header has kWrittenDirect
//   finds kWrittenDirect in the header:    <---
//   copies nothing
//
// Slots, steps and headers are used as without direct writes, so no rank waits for more than it
// does without them. A sender that loads the window before the receiver has begun uses the slot. A
// sender that finds the window is ordered behind all work that the receiver's stream held before.
// Plans are proved (plan::kFlagDirectWrite) for the accesses of the receiver's own rows before that
// write.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels/memory.h"
#include "device/kernels/program.h"
#include "device/kernels/protocols.h"

namespace pycoll::device {

PYCOLL_DEVICE Registered registered_at(const Program& program, std::uint32_t rank,
                                       std::uint64_t number) {
  const Registered* entry = &program.registered[rank * kRegisteredMax + number];
  // The host may clear the entry at the same time. A half-written entry is empty: one field is
  // zero.
  return {load(&entry->memory), load(&entry->bytes)};
}

// Writes the window, unless the memory has lapsed: a replayed launch does not know that.
PYCOLL_DEVICE void open_window(const Program& program, const Call& call, const Port* port,
                               std::uint64_t uses) {
  if (call.registered >= kRegisteredMax || port->window == nullptr) return;
  const Registered mine = registered_at(program, program.rank, call.registered);
  const auto offset = static_cast<std::uint64_t>(call.output - mine.memory);
  if (offset >= mine.bytes) return;
  WriteWindow* window = port->window;
  store(&window->uses, uses);
  store(&window->number, call.registered);
  store(&window->offset, offset);
  store(&window->bytes, call.output_bytes);
  store(&window->agreement, program.share_offsets[0].agreement);
  store_release(&window->begun, load(&port->begun));
}

// Runs before a lane's first row: records for each channel the step at which this launch began, and
// writes the windows.
PYCOLL_DEVICE void begin_direct_write(const Program& program, const Call& call, std::uint32_t lane,
                                      std::uint32_t share) {
  if (program.direct_writes == nullptr) return;
  for (std::uint32_t i = thread(); i < program.channel_count; i += threads()) {
    const DirectWrite& entry = program.direct_writes[i];
    if (entry.lane != lane) continue;
    Port* port = program.ports[i * program.shares + share];
    store(&port->begun, load(&port->step) + 1);
    if (entry.uses != 0) open_window(program, call, port, entry.uses);
  }
  (void)sync_any(false);
}

// Whether the row's segments may be direct writes, and the segments that the row receives may bring
// news of the destinations' windows. Then a barrier is worth its cost, to load the windows behind
// the received segments. Incomplete sums are combined further, so they are never direct writes.
PYCOLL_DEVICE bool may_write_direct_after_receive(const Program& program, const plan::Row& row) {
  const bool is_whole = plan::operand_count(row) == 1 || (row.flags & plan::kFlagFinal) != 0;
  return program.direct_writes != nullptr && row.recv_count != 0 && row.send_count != 0 && is_whole;
}

// Where the row's sender puts a segment that has a free slot `slot`; called by the thread that
// serves the channel. `skip` is the segment's distance in bytes from the share's first byte.
PYCOLL_DEVICE std::byte* destination_of(const Program& program, const Slot& slot,
                                        const plan::Row& row, const ShareOffsets& offsets,
                                        std::uint64_t skip, std::uint32_t bytes) {
  const WriteWindow* window = slot.port->window;
  if (program.direct_writes == nullptr || window == nullptr) return slot.data;
  const auto index = static_cast<std::uint32_t>(&row - program.rows);
  const std::uint8_t use = program.uses[index * plan::kSendMax + thread() - plan::kRecvMax];
  // Whole packs only: a slot has space behind a segment, an output has other data there.
  if (use >= plan::kWindowUses || bytes == 0 || bytes % kPackBytes != 0) return slot.data;
  if (load_acquire(&window->begun) != load(&slot.port->begun)) return slot.data;
  const std::uint64_t begin = offsets.direct_write + skip;
  const bool fits = begin + bytes <= load(&window->bytes);
  const bool agrees = load(&window->agreement) == offsets.agreement;
  if (!fits || !agrees || (load(&window->uses) >> use & 1) == 0) return slot.data;
  const std::uint64_t offset = load(&window->offset) + begin;
  const Registered there = registered_at(program, slot.port->peer, load(&window->number));
  const auto address = reinterpret_cast<std::uintptr_t>(there.memory) + offset;
  if (offset + bytes > there.bytes || address % kPackBytes != 0) return slot.data;
  return there.memory + offset;
}

}  // namespace pycoll::device
