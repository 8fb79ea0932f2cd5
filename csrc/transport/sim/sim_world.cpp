#include "transport/sim/sim_world.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/bytes.h"

namespace pycoll::transport {
namespace {

constexpr int kSlowFactor = 100;
constexpr int kPiecesMax = 5;
constexpr int kSpoiled = 0xdb;

}  // namespace

void SimSlot::copy_until(std::size_t until) {
  if (handed_over == nullptr || until <= copied) return;
  std::memcpy(data.at_least(header.bytes) + copied, handed_over + copied, until - copied);
  copied = until;
}

std::byte* SimMemory::at_least(std::size_t bytes) {
  const std::size_t wanted = std::max<std::size_t>(1, div_ceil(bytes, sizeof(Line)));
  if (wanted > count_) {
    lines_ = std::make_unique_for_overwrite<Line[]>(wanted);
    count_ = wanted;
  }
  return lines_[0].bytes;
}

void SimMemory::spoil(std::size_t bytes) {
  if (bytes != 0) std::memset(at_least(bytes), kSpoiled, bytes);
}

SimWorld::SimWorld(SimOptions options) : options_(std::move(options)), prng_(options_.seed) {
  PYCOLL_ASSERT(options_.size >= 1, "size is %d", options_.size);
  PYCOLL_ASSERT(0 < options_.delay_min && options_.delay_min <= options_.delay_max,
                "delay_min is %lld, delay_max %lld", static_cast<long long>(options_.delay_min),
                static_cast<long long>(options_.delay_max));
  const auto size = static_cast<std::size_t>(options_.size);
  wires_ = std::vector<SimWire>(size * size);
  dead_.assign(size, false);
  closed_.assign(size, false);
  news_.assign(size, false);
  const auto spread = static_cast<std::uint64_t>(options_.delay_max - options_.delay_min) + 1;
  for (std::size_t index = 0; index < wires_.size(); ++index) {
    SimWire& wire = wires_[index];
    wire.from = static_cast<int>(index / size);
    wire.to = static_cast<int>(index % size);
    const auto one = static_cast<Nanoseconds>(prng_.below(spread));
    const auto other = static_cast<Nanoseconds>(prng_.below(spread));
    wire.delay_min = options_.delay_min + std::min(one, other);
    wire.delay_max = options_.delay_min + std::max(one, other);
    wire.kib_time = options_.kib_time;
  }
  if (options_.slow_link && size > 1) {
    const std::uint64_t from = prng_.below(size);
    SimWire& slow = wires_[from * size + (from + 1 + prng_.below(size - 1)) % size];
    slow.delay_min *= kSlowFactor;
    slow.delay_max *= kSlowFactor;
    slow.kib_time *= kSlowFactor;
  }
  for (const SimCut& one : options_.cuts) {
    plan({.at = one.at, .kind = Kind::kCut, .from = one.first, .to = one.second});
  }
  for (const SimDeath& one : options_.deaths) {
    plan({.at = one.at,
          .kind = Kind::kDeath,
          .from = one.rank,
          .to = one.rank,
          .value = static_cast<std::uint64_t>(one.detection_max)});
  }
}

SimWire& SimWorld::wire(int from, int to) {
  return wires_[static_cast<std::size_t>(from) * static_cast<std::size_t>(options_.size) +
                static_cast<std::size_t>(to)];
}

SimPipe& SimWorld::pipe(SimWire& wire, std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel number is %u", number);
  auto& pipe = wire.pipes[number];
  if (pipe == nullptr) pipe = std::make_unique<SimPipe>();
  return *pipe;
}

void SimWorld::plan(Event event) {
  event.order = planned_++;
  events_.push(event);
}

Nanoseconds SimWorld::draw_delay(const SimWire& wire, bool jitter) {
  const auto spread = static_cast<std::uint64_t>(wire.delay_max - wire.delay_min) + 1;
  Nanoseconds delay = wire.delay_min + static_cast<Nanoseconds>(prng_.below(spread));
  // Mostly short and rarely very long delays expose more faults than any uniform range.
  if (jitter) delay = delay << prng_.below(6) >> prng_.below(3);
  return delay;
}

void SimWorld::send(SimWire& wire, std::uint32_t number, const SegmentHeader& header,
                    const std::byte* handed_over) {
  SimPipe& pipe = SimWorld::pipe(wire, number);
  const std::uint64_t index = pipe.sent++;
  if (wire.broken) return;
  SimSlot& slot = pipe.slots[index % kChannelDepth];
  slot.header = header;
  slot.handed_over = header.bytes != 0 ? handed_over : nullptr;
  slot.copied = 0;
  if (slot.handed_over != nullptr) {
    ++pipe.reading;
  } else if (header.bytes != 0) {
    std::memcpy(slot.data.at_least(header.bytes), pipe.slot_buffer.at_least(header.bytes),
                header.bytes);
    pipe.slot_buffer.spoil(header.bytes);
  }
  Nanoseconds at = now() + draw_delay(wire, false) +
                   static_cast<Nanoseconds>(div_ceil(header.bytes, 1024)) * wire.kib_time;
  at = std::max(at, pipe.last_arrival);
  if (!options_.reorder) at = wire.behind_others(at);
  pipe.last_arrival = at;
  wire.busy_until = std::max(wire.busy_until, at);
  const std::uint64_t pieces =
      options_.partial && header.bytes != 0 ? 1 + prng_.below(kPiecesMax) : 1;
  for (std::uint64_t piece = 1; piece <= pieces; ++piece) {
    const auto share = static_cast<Nanoseconds>(piece);
    plan({.at = now() + (at - now()) * share / static_cast<Nanoseconds>(pieces),
          .kind = piece == pieces ? Kind::kSegment : Kind::kPiece,
          .from = wire.from,
          .to = wire.to,
          .number = number,
          .value = index,
          .until = header.bytes * piece / pieces});
  }
}

void SimWorld::release(SimWire& wire, std::uint32_t number) {
  SimPipe& pipe = SimWorld::pipe(wire, number);
  SimSlot& slot = pipe.slots[pipe.released % kChannelDepth];
  slot.data.spoil(slot.header.bytes);
  ++pipe.released;
  if (wire.broken) return;
  SimWire& back = this->wire(wire.to, wire.from);
  Nanoseconds at = now() + draw_delay(back, options_.jitter_slot_buffers);
  if (!options_.jitter_slot_buffers) at = back.behind_others(at);
  plan({.at = at,
        .kind = Kind::kSlotBuffer,
        .from = wire.from,
        .to = wire.to,
        .number = number,
        .value = pipe.released});
}

void SimWorld::post(SimWire& wire, const Notice& notice) {
  if (wire.posted.failure != 0) return;
  wire.posted = notice;
  const std::uint64_t number = ++wire.posted_number;
  if (wire.broken) return;
  Nanoseconds at = now() + draw_delay(wire, options_.delay_notices);
  if (!options_.delay_notices) at = wire.behind_others(at);
  wire.busy_until = std::max(wire.busy_until, at);
  wire.notices.emplace(number, notice);
  plan({.at = at, .kind = Kind::kNotice, .from = wire.from, .to = wire.to, .value = number});
}

void SimWorld::let_go(int rank) {
  for (int peer = 0; peer < options_.size; ++peer) {
    if (peer == rank) continue;
    for (auto& pipe : wire(rank, peer).pipes) {
      for (std::uint64_t i = pipe ? pipe->arrived : 0; pipe && i < pipe->sent; ++i) {
        SimSlot& slot = pipe->slots[i % kChannelDepth];
        slot.copy_until(slot.header.bytes);
        slot.handed_over = nullptr;
      }
      if (pipe) pipe->reading = 0;
    }
  }
}

// The close arrives after all other traffic on its wire.
void SimWorld::close(int rank) {
  if (closed_[static_cast<std::size_t>(rank)] || dead(rank)) return;
  let_go(rank);
  for (int peer = 0; peer < options_.size; ++peer) {
    if (peer == rank) continue;
    SimWire& out = wire(rank, peer);
    if (out.broken) continue;
    Notice notice = out.posted;
    notice.failure = static_cast<std::uint32_t>(Code::kClosed);
    post(out, notice);
    plan({.at = std::max(now() + draw_delay(out, false), out.busy_until),
          .kind = Kind::kClose,
          .from = rank,
          .to = peer});
  }
  closed_[static_cast<std::size_t>(rank)] = true;
}

bool SimWorld::poll(int rank) {
  if (quiet(rank)) return false;
  news_[static_cast<std::size_t>(rank)] = false;
  for (int peer = 0; peer < options_.size; ++peer) {
    SimWire& in = wire(peer, rank);
    in.state_shown = in.state;
    in.shown = in.arrived;
    SimWire& out = wire(rank, peer);
    for (std::size_t number = 0; number < kChannelsMax; ++number) {
      if (in.pipes[number]) in.pipes[number]->shown = in.pipes[number]->arrived;
      if (out.pipes[number]) out.pipes[number]->space_shown = out.pipes[number]->returned;
    }
  }
  return true;
}

// The execution of events of the simulated network.

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
