// Device code: segments that their sender writes to the receiver's output instead of to a slot.
//
//   receiver                                      sender
//   its launch begins; for each channel
//   that brings what it would only copy
//   to an output that is registered:
//   writes the Offer, `begun` last        --->    has room for a segment: looks at the Offer once.
//                                                 If it is of this launch, the segment goes to its
//                                                 place, and the header says kLanded
//   finds kLanded in the header: nothing   <---
//   to copy
//
// Rooms, steps and headers are those of slots, so nothing waits for more than it did. Who looks
// before the receiver has begun uses the slot. Behind the look the sender comes behind all that the
// receiver's stream held before; what the receiver's own rows do there before, plans are proved for
// (plan::kFlagLand).
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/memory.h"
#include "device/program.h"
#include "device/protocols.h"

namespace pycoll::device {

PYCOLL_DEVICE Registered registered_at(const Program& program, std::uint32_t rank,
                                       std::uint64_t number) {
  const Registered* entry = &program.registered[rank * kRegisteredMax + number];
  // The host may write the entry meanwhile; half of one is none, for in between it is empty.
  return {load(&entry->memory), load(&entry->bytes)};
}

// Unless the memory is registered no more: a replay does not know.
PYCOLL_DEVICE void make_offer(const Program& program, const Call& call, const Port* port,
                              std::uint64_t uses) {
  if (call.registered >= kRegisteredMax || port->offer == nullptr) return;
  const Registered mine = registered_at(program, program.rank, call.registered);
  const auto offset = static_cast<std::uint64_t>(call.output - mine.memory);
  if (offset >= mine.bytes) return;
  Offer* offer = port->offer;
  store(&offer->uses, uses);
  store(&offer->number, call.registered);
  store(&offer->offset, offset);
  store(&offer->bytes, call.output_bytes);
  store(&offer->agreement, program.places[0].agreement);
  store_release(&offer->begun, load(&port->begun));
}

// Before a lane's first row: its channels know from which step on this launch is; offers are made.
PYCOLL_DEVICE void begin_landing(const Program& program, const Call& call, std::uint32_t lane,
                                 std::uint32_t share) {
  if (program.landings == nullptr) return;
  for (std::uint32_t i = thread(); i < program.channel_count; i += threads()) {
    const Landing& one = program.landings[i];
    if (one.lane != lane) continue;
    Port* port = program.ports[i * program.shares + share];
    store(&port->begun, load(&port->step) + 1);
    if (one.uses != 0) make_offer(program, call, port, one.uses);
  }
  (void)sync_any(false);
}

// Whether what the row sends may land, and those it is sent to are heard of by what the row
// receives: then it is worth a meeting to look behind that. Sums that are not complete are combined
// further, so they never land.
PYCOLL_DEVICE bool may_land_behind_what_came(const Program& program, const plan::Row& row) {
  const bool is_whole = plan::operand_count(row) == 1 || (row.flags & plan::kFlagFinal) != 0;
  return program.landings != nullptr && row.recv_count != 0 && row.send_count != 0 && is_whole;
}

// Where the row's sender puts a segment that has room in `slot`; by the thread that looks after the
// channel. `skip` is the segment's distance in bytes from the place.
PYCOLL_DEVICE std::byte* place_of(const Program& program, const Slot& slot, const plan::Row& row,
                                  const Place& place, std::uint64_t skip, std::uint32_t bytes) {
  const Offer* offer = slot.port->offer;
  if (program.landings == nullptr || offer == nullptr) return slot.data;
  const auto index = static_cast<std::uint32_t>(&row - program.rows);
  const std::uint8_t use = program.uses[index * plan::kSendMax + thread() - plan::kRecvMax];
  // Whole packs alone: behind a segment slots have room, and outputs what others wrote.
  if (use >= plan::kOfferedUses || bytes == 0 || bytes % kPackBytes != 0) return slot.data;
  if (load_acquire(&offer->begun) != load(&slot.port->begun)) return slot.data;
  const std::uint64_t begin = place.landing + skip;
  const bool fits = begin + bytes <= load(&offer->bytes);
  const bool agrees = load(&offer->agreement) == place.agreement;
  if (!fits || !agrees || (load(&offer->uses) >> use & 1) == 0) return slot.data;
  const std::uint64_t offset = load(&offer->offset) + begin;
  const Registered there = registered_at(program, slot.port->peer, load(&offer->number));
  const auto address = reinterpret_cast<std::uintptr_t>(there.memory) + offset;
  if (offset + bytes > there.bytes || address % kPackBytes != 0) return slot.data;
  return there.memory + offset;
}

}  // namespace pycoll::device
