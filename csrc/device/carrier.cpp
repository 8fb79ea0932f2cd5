#include "device/carrier.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "base/copy.h"
#include "device/protocols.h"
#include "runtime/verdict.h"

namespace pycoll::device {
namespace {

// Looks without a rest in between, those after short ones, and how long the rests are: a kernel
// cannot wake a thread of the host.
constexpr std::uint32_t kEagerLooks = 200;
constexpr std::uint32_t kShortRests = 1000;
constexpr std::chrono::microseconds kShortRest{50};
constexpr std::chrono::microseconds kLongRest{500};
// Room is told of in such steps, so that every segment does not cost a message back.
constexpr std::uint64_t kRoomStep = kDepth / 2;
// Channel of a wire on which room is told of; below it those of the devices, by number.
constexpr std::uint32_t kRoomChannel = transport::kChannelsMax - 1;

// Kernels write and read there too. Paired with their fences.
std::uint64_t load_of(std::uint64_t* word) {
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}
void store_to(std::uint64_t* word, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_release);
}

// Both halves say by themselves whether they are of this step.
Pack load_header(const End& end, std::uint64_t step) {
  Pack* header = end.headers + step % kDepth;
  return {load_of(&header->low), load_of(&header->high)};
}
void store_header(const End& end, std::uint64_t step, std::uint64_t data) {
  Pack* header = end.headers + step % kDepth;
  const Pack line = Ll::line(data, Ll::flag(step));
  store_to(&header->low, line.low);
  store_to(&header->high, line.high);
}

// After so many looks in vain.
void rest(std::uint32_t idle) {
  if (idle <= kEagerLooks) return std::this_thread::yield();
  std::this_thread::sleep_for(idle <= kEagerLooks + kShortRests ? kShortRest : kLongRest);
}

}  // namespace

transport::Transport* wire_to(const std::vector<std::shared_ptr<transport::Transport>>& wires,
                              int peer) {
  const auto leads = [&](const auto& wire) { return wire->link(peer) != nullptr; };
  const auto found = std::find_if(wires.begin(), wires.end(), leads);
  return found == wires.end() ? nullptr : found->get();
}

Carrier::Carrier(Options options)
    : options_(std::move(options)), stride_(slot_stride(options_.shape, Protocol::kSimple)) {}

Carrier::~Carrier() { close(0); }

Status Carrier::create(Options options, std::unique_ptr<Carrier>* carrier) {
  PYCOLL_ASSERT(options.shape.numbers <= kRoomChannel, "%u numbers", options.shape.numbers);
  std::unique_ptr<Carrier> made(new Carrier(std::move(options)));
  Status status = made->open();
  if (status.ok()) *carrier = std::move(made);
  return status;
}

Status Carrier::open() {
  const Shape& shape = options_.shape;
  for (const Way& way : options_.ways) {
    Line& line = lines_.emplace_back();
    line.way = way;
    const int peer = static_cast<int>(way.peer);
    transport::Transport* wire = wire_to(options_.wires, peer);
    if (wire == nullptr) {
      return Status::error(Code::kInvalidArgument,
                           "nothing leads to " + runtime::name_rank(peer, options_.names), {peer});
    }
    line.link = wire->link(peer);
    for (std::uint32_t channel = 0; channel < shape.numbers * shape.shares; ++channel) {
      const auto end = [&](plan::Direction direction) {
        return carried_end(shape, way.memory, channel / shape.shares, direction,
                           channel % shape.shares);
      };
      line.out.push_back({end(plan::Direction::kSend)});
      line.in.push_back({end(plan::Direction::kRecv)});
    }
  }
  return Status();
}

Status Carrier::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status::error(Code::kTransport,
                         std::string("cannot start the thread that carries between devices (") +
                             error.what() + "): raise the limit of processes (ulimit -u)");
  }
  return Status();
}

void Carrier::run() {
  for (std::uint32_t idle = 0;;) {
    // Before the pass: kernels may have written behind its back, and their rank have left since.
    const bool leaving = leaving_.load(std::memory_order_acquire);
    const bool moved = pass();
    if (leaving && is_over(moved)) return;
    idle = moved ? 0 : idle + 1;
    if (idle != 0) rest(idle);
  }
}

bool Carrier::is_over(bool moved) const {
  return (!moved && !waiting_) || options_.clock->now() >= leaves_by_.load();
}

bool Carrier::pass() {
  bool moved = false;
  waiting_ = false;
  for (const auto& wire : options_.wires) moved |= wire->poll();
  for (Line& line : lines_) {
    if (line.broken) continue;
    const bool is_lost = line.link->state() == transport::LinkState::kLost;
    bool came = hear_of_room(line);
    came |= receive(line);
    // What had arrived whole counts, also of a peer that is lost since.
    if (is_lost && !came) break_off(line, line.link->reason());
    moved |= came;
    moved |= free_read(line);
    moved |= send(line);
    moved |= give_back(line);
  }
  show_landed();
  return moved;
}

std::byte* Carrier::slot_of(const End& end, std::uint64_t step) const {
  return end.slots + step % kDepth * stride_;
}

bool Carrier::send(Line& line) {
  if (line.link->state() != transport::LinkState::kOpen) return false;
  bool moved = false;
  for (std::uint32_t channel = 0; channel < line.out.size(); ++channel) {
    while (send_one(line, channel)) moved = true;
  }
  return moved;
}

bool Carrier::send_one(Line& line, std::uint32_t channel) {
  Outgoing& out = line.out[channel];
  const Pack header = load_header(out.end, out.step);
  if (line.broken || !Ll::has(header, Ll::flag(out.step))) return false;
  waiting_ |= out.step >= out.freed + kDepth;
  if (out.step >= out.freed + kDepth) return false;
  const std::uint64_t data = Ll::data_of(header);
  const auto bytes = static_cast<std::uint32_t>(data & kLengthMask);
  if (bytes > stride_) {
    break_off(line, "memory of its channels was overwritten");
    return false;
  }
  const bool sent = dispatch(line, out, {out.step, data, bytes, channel});
  waiting_ |= !sent;
  if (!sent) return false;
  ++out.step;
  if (line.way.sends_direct) return true;
  // The kernel may fill the slot again; see await_room in executor.h.
  out.read = out.step;
  store_to(out.end.credit, out.step);
  return true;
}

// False while the wire has no room.
bool Carrier::dispatch(Line& line, const Outgoing& out, const transport::SegmentHeader& header) {
  const Shape& shape = options_.shape;
  const std::uint32_t number = header.tag / shape.shares;
  auto& wire = line.link->send_channel(number);
  const std::byte* slot = slot_of(out.end, out.step);
  transport::Passage passage;
  if (line.way.places) {
    const std::uint64_t slots = carried_slots_at(shape, number, header.tag % shape.shares);
    passage.to = slots + out.step % kDepth * stride_;
  }
  if (line.way.sends_direct) {
    passage.from = slot;
    return wire.pass(header, passage);
  }
  std::byte* room = wire.reserve(header.bytes);
  if (room == nullptr) return false;
  if (header.bytes != 0) wire.fill(room, slot, header.bytes);
  if (line.way.places) return wire.pass(header, passage);
  wire.commit(header);
  return true;
}

// Slots on the device that the card has read.
bool Carrier::free_read(Line& line) {
  if (!line.way.sends_direct) return false;
  bool moved = false;
  for (std::uint32_t channel = 0; channel < line.out.size(); ++channel) {
    Outgoing& out = line.out[channel];
    if (out.read == out.step) continue;
    auto& wire = line.link->send_channel(channel / options_.shape.shares);
    const std::uint64_t before = out.read;
    while (out.read < out.step && !wire.reads(slot_of(out.end, out.read), stride_)) ++out.read;
    if (out.read != before) store_to(out.end.credit, out.read);
    moved |= out.read != before;
    waiting_ |= out.read < out.step;
  }
  return moved;
}

bool Carrier::receive(Line& line) {
  bool moved = false;
  for (std::uint32_t number = 0; number < options_.shape.numbers; ++number) {
    auto& wire = line.link->recv_channel(number);
    for (const transport::Segment* segment = wire.peek(); segment != nullptr;
         segment = wire.peek()) {
      if (!place(line, *segment)) {
        break_off(line, "it sent what no device sends");
        return true;
      }
      wire.release();
      moved = true;
    }
  }
  return moved;
}

// False for what does not belong there.
bool Carrier::place(Line& line, const transport::Segment& segment) {
  const transport::SegmentHeader& header = segment.header;
  if (header.tag >= line.in.size() || header.bytes > stride_) return false;
  Incoming& in = line.in[header.tag];
  if (header.sequence != in.step || in.step >= load_of(in.end.credit) + kDepth) return false;
  if (segment.placed != line.way.lands_direct) return false;
  if (segment.placed) {
    landed_.push_back({&line, in.end, in.step, header.agreement});
  } else {
    if (header.bytes != 0) copy_bytes(slot_of(in.end, in.step), segment.data, header.bytes);
    store_header(in.end, in.step, header.agreement);
  }
  ++in.step;
  return true;
}

// One flush serves all that has come in a pass.
void Carrier::show_landed() {
  if (landed_.empty()) return;
  const Status status = options_.flush ? options_.flush() : Status();
  for (const Landed& one : landed_) {
    if (status.ok()) {
      store_header(one.end, one.step, one.data);
    } else {
      break_off(*one.line, status.message());
    }
  }
  landed_.clear();
}

bool Carrier::give_back(Line& line) {
  if (line.link->state() != transport::LinkState::kOpen) return false;
  bool moved = false;
  for (std::uint32_t channel = 0; channel < line.in.size(); ++channel) {
    Incoming& in = line.in[channel];
    const std::uint64_t freed = load_of(in.end.credit);
    if (freed < in.told + kRoomStep) continue;
    auto& wire = line.link->send_channel(kRoomChannel);
    if (wire.reserve(0) == nullptr) break;
    wire.commit({freed, 0, 0, channel});
    in.told = freed;
    moved = true;
  }
  return moved;
}

bool Carrier::hear_of_room(Line& line) {
  auto& wire = line.link->recv_channel(kRoomChannel);
  bool moved = false;
  for (const transport::Segment* segment = wire.peek(); segment != nullptr; segment = wire.peek()) {
    const transport::SegmentHeader header = segment->header;
    wire.release();
    moved = true;
    if (header.tag >= line.out.size() || header.sequence > line.out[header.tag].step ||
        header.sequence < line.out[header.tag].freed) {
      break_off(line, "it gave back what it never had");
      return true;
    }
    line.out[header.tag].freed = header.sequence;
  }
  return moved;
}

void Carrier::break_off(Line& line, const std::string& why) {
  line.broken = true;
  const std::lock_guard<std::mutex> lock(telling_);
  if (lost_ >= 0) return;
  lost_ = static_cast<int>(line.way.peer);
  why_ = why;
}

Status Carrier::lost(const std::string& operation) const {
  const std::lock_guard<std::mutex> lock(telling_);
  if (lost_ < 0) return Status();
  return runtime::peer_lost_verdict(lost_, why_, operation, options_.names);
}

void Carrier::close(Nanoseconds patience) {
  const std::lock_guard<std::mutex> lock(closing_);
  leaves_by_.store(later(options_.clock->now(), patience));
  leaving_.store(true, std::memory_order_release);
  if (thread_.joinable()) thread_.join();
  for (const auto& wire : std::exchange(options_.wires, {})) wire->close();
}

}  // namespace pycoll::device
