// The execution of events of the simulated network.

#include <algorithm>

#include "base/assert.h"
#include "base/bytes.h"
#include "transport/sim/sim_world.h"

namespace pycoll::transport {

Nanoseconds SimWorld::next_event_time() const {
  return events_.empty() ? kForever : events_.top().at;
}

bool SimWorld::advance() {
  if (events_.empty()) return false;
  const Event event = events_.top();
  events_.pop();
  clock_->set(std::max(now(), event.at));
  happen(event);
  return true;
}

void SimWorld::advance_to(Nanoseconds time) {
  while (next_event_time() <= time && advance()) {
  }
  clock_->set(std::max(now(), time));
}

void SimWorld::record(const Event& event) {
  ++event_count_;
  const std::uint64_t facts[] = {static_cast<std::uint64_t>(now()),
                                 static_cast<std::uint64_t>(event.kind),
                                 static_cast<std::uint64_t>(event.from),
                                 static_cast<std::uint64_t>(event.to),
                                 event.number,
                                 event.value,
                                 event.until};
  trace_ = hash_bytes(facts, sizeof facts, trace_);
}

void SimWorld::happen(const Event& event) {
  record(event);
  SimWire& wire = this->wire(event.from, event.to);
  const bool travels = event.kind <= Kind::kClose;
  if (travels && wire.broken) return;
  switch (event.kind) {
    case Kind::kPiece:
    case Kind::kSegment:
      return piece_arrives(wire, event);
    case Kind::kSlotBuffer:
      return slot_buffer_returns(wire, event);
    case Kind::kNotice:
      return notice_arrives(wire, event.value);
    case Kind::kClose:
      if (wire.state == LinkState::kOpen) wire.state = LinkState::kClosed;
      return tell(event.to);
    case Kind::kCut:
      return cut_now(event.from, event.to);
    case Kind::kDeath:
      return die(event.from, static_cast<Nanoseconds>(event.value));
    case Kind::kDetection:
      return lose(wire, "rank " + std::to_string(event.from) + " died");
  }
}

void SimWorld::piece_arrives(SimWire& wire, const Event& event) {
  SimPipe& pipe = SimWorld::pipe(wire, event.number);
  SimSlot& slot = pipe.slots[event.value % kChannelDepth];
  slot.copy_until(event.until);
  if (event.kind == Kind::kPiece) return;
  PYCOLL_ASSERT(event.value == pipe.arrived, "segment %llu arrives after %llu others",
                static_cast<unsigned long long>(event.value),
                static_cast<unsigned long long>(pipe.arrived));
  ++pipe.arrived;
  if (slot.handed_over != nullptr) {
    slot.handed_over = nullptr;
    --pipe.reading;
    tell(wire.from);
  }
  if (!options_.hide_until_poll) pipe.shown = pipe.arrived;
  tell(wire.to);
}

void SimWorld::slot_buffer_returns(SimWire& wire, const Event& event) {
  SimPipe& pipe = SimWorld::pipe(wire, event.number);
  pipe.returned = std::max(pipe.returned, event.value);
  if (!options_.hide_until_poll) pipe.space_shown = pipe.returned;
  tell(wire.from);
}

void SimWorld::notice_arrives(SimWire& wire, std::uint64_t number) {
  const auto found = wire.notices.find(number);
  PYCOLL_ASSERT(found != wire.notices.end(), "notice %llu from %d to %d is gone",
                static_cast<unsigned long long>(number), wire.from, wire.to);
  if (number > wire.arrived_number) {
    wire.arrived = found->second;
    wire.arrived_number = number;
    if (!options_.hide_until_poll) wire.shown = wire.arrived;
    tell(wire.to);
  }
  wire.notices.erase(found);
}

// Discards everything in flight, and stops reading handed-over memory.
void SimWorld::break_link(int a, int b) {
  for (SimWire* one : {&wire(a, b), &wire(b, a)}) {
    one->broken = true;
    for (auto& pipe : one->pipes) {
      if (pipe == nullptr) continue;
      pipe->reading = 0;
      for (SimSlot& slot : pipe->slots) slot.handed_over = nullptr;
    }
  }
}

void SimWorld::lose(SimWire& wire, const std::string& reason) {
  if (wire.state != LinkState::kOpen) return;
  wire.state = LinkState::kLost;
  wire.reason = reason;
  tell(wire.to);
}

void SimWorld::cut(int first, int second) {
  record({.kind = Kind::kCut, .from = first, .to = second});
  cut_now(first, second);
}

void SimWorld::cut_now(int first, int second) {
  break_link(first, second);
  const std::string reason = "the link between ranks " + std::to_string(first) + " and " +
                             std::to_string(second) + " was cut";
  lose(wire(first, second), reason);
  lose(wire(second, first), reason);
}

void SimWorld::kill(int rank, Nanoseconds detection_max) {
  record({.kind = Kind::kDeath, .from = rank, .to = rank});
  die(rank, detection_max);
}

void SimWorld::die(int rank, Nanoseconds detection_max) {
  if (dead(rank) || closed_[static_cast<std::size_t>(rank)]) return;
  dead_[static_cast<std::size_t>(rank)] = true;
  for (int peer = 0; peer < options_.size; ++peer) {
    if (peer == rank) continue;
    break_link(rank, peer);
    const auto bound = static_cast<std::uint64_t>(std::max<Nanoseconds>(0, detection_max)) + 1;
    plan({.at = now() + static_cast<Nanoseconds>(prng_.below(bound)),
          .kind = Kind::kDetection,
          .from = rank,
          .to = peer});
  }
}

}  // namespace pycoll::transport
