#include "device/host_proxy/proxy.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "base/copy.h"
#include "device/kernels/protocols.h"
#include "engine/diagnosis/verdict.h"

namespace pycoll::device {
namespace {

// Polls without a rest, polls with short rests, and the lengths of the rests. A kernel cannot wake
// a thread of the host.
constexpr std::uint32_t kEagerLooks = 200;
constexpr std::uint32_t kShortRests = 1000;
constexpr std::chrono::microseconds kShortRest{50};
constexpr std::chrono::microseconds kLongRest{500};
// Released slots are reported in batches of this many, so that not every segment costs a message.
constexpr std::uint64_t kSpaceStep = kDepth / 2;
// The channel of a wire that reports released slots; the numbers below are device channels.
constexpr std::uint32_t kSlotBufferChannel = transport::kChannelsMax - 1;

// Kernels access the words concurrently. Paired with their fences.
std::uint64_t load_of(std::uint64_t* word) {
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}
void store_to(std::uint64_t* word, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_release);
}

// Each half of a header carries a flag of its step.
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

// `idle` passes in a row have found nothing.
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

HostProxy::HostProxy(Options options)
    : options_(std::move(options)), stride_(slot_stride(options_.shape, Protocol::kSimple)) {}

HostProxy::~HostProxy() { close(0); }

Status HostProxy::create(Options options, std::unique_ptr<HostProxy>* host_proxy) {
  PYCOLL_ASSERT(options.shape.numbers <= kSlotBufferChannel, "%u numbers", options.shape.numbers);
  std::unique_ptr<HostProxy> made(new HostProxy(std::move(options)));
  Status status = made->open();
  if (status.ok()) *host_proxy = std::move(made);
  return status;
}

Status HostProxy::open() {
  const Shape& shape = options_.shape;
  for (const Way& way : options_.ways) {
    Line& line = lines_.emplace_back();
    line.way = way;
    const int peer = static_cast<int>(way.peer);
    transport::Transport* wire = wire_to(options_.wires, peer);
    if (wire == nullptr) {
      return Status::error(Code::kInvalidArgument,
                           "no connection leads to " + engine::name_rank(peer, options_.names),
                           {peer});
    }
    line.link = wire->link(peer);
    for (std::uint32_t number = 0; number < shape.numbers; ++number) {
      auto& channel = line.link->send_channel(number);
      line.wires.push_back({&channel, channel.capabilities()});
    }
    for (std::uint32_t channel = 0; channel < shape.numbers * shape.shares; ++channel) {
      const auto end = [&](plan::Direction direction) {
        return proxied_end(shape, way.memory, channel / shape.shares, direction,
                           channel % shape.shares);
      };
      line.out.push_back({end(plan::Direction::kSend)});
      line.in.push_back({end(plan::Direction::kRecv)});
    }
  }
  return Status();
}

Status HostProxy::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status::error(Code::kTransport,
                         std::string("cannot start the thread of the host proxy (") + error.what() +
                             "): raise the limit of processes (ulimit -u)");
  }
  return Status();
}

void HostProxy::run() {
  for (std::uint32_t idle = 0;;) {
    // Read before the pass: a kernel may write a segment during the pass, and its rank may then
    // leave.
    const bool leaving = leaving_.load(std::memory_order_acquire);
    const bool moved = pass();
    if (leaving && is_over(moved)) return;
    idle = moved ? 0 : idle + 1;
    if (idle != 0) rest(idle);
  }
}

bool HostProxy::is_over(bool moved) const {
  return (!moved && !waiting_) || options_.clock->now() >= leaves_by_.load();
}

bool HostProxy::pass() {
  bool moved = false;
  waiting_ = false;
  for (const auto& wire : options_.wires) moved |= wire->poll();
  for (Line& line : lines_) {
    if (line.broken) continue;
    const bool is_lost = line.link->state() == transport::LinkState::kLost;
    bool came = hear_of_space(line);
    came |= receive(line);
    // Segments that have arrived whole count, also from a peer that was lost afterwards.
    if (is_lost && !came) break_off(line, line.link->reason());
    moved |= came;
    moved |= free_read(line);
    moved |= send(line);
    moved |= give_back(line);
  }
  publish_headers();
  return moved;
}

std::byte* HostProxy::slot_of(const End& end, std::uint64_t step) const {
  return end.slots + step % kDepth * stride_;
}

bool HostProxy::send(Line& line) {
  if (line.link->state() != transport::LinkState::kOpen) return false;
  bool moved = false;
  for (std::uint32_t channel = 0; channel < line.out.size(); ++channel) {
    while (send_one(line, channel)) moved = true;
  }
  return moved;
}

bool HostProxy::send_one(Line& line, std::uint32_t channel) {
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
  // The kernel may fill the slot again; see await_space() in executor.h.
  out.read = out.step;
  store_to(out.end.credit, out.step);
  return true;
}

// False while the wire has no free slot.
bool HostProxy::dispatch(Line& line, const Outgoing& out, const transport::SegmentHeader& header) {
  const Shape& shape = options_.shape;
  const std::uint32_t number = header.tag / shape.shares;
  const Wire& wire = line.wires[number];
  const std::byte* slot = slot_of(out.end, out.step);
  transport::Passage passage;
  if (line.way.peer_granted) {
    const std::uint64_t slots = proxied_slots_at(shape, number, header.tag % shape.shares);
    passage.to = slots + out.step % kDepth * stride_;
  }
  if (line.way.sends_direct) {
    passage.from = slot;
    return wire.can.regions->pass(header, passage);
  }
  std::byte* slot_buffer = wire.channel->reserve(header.bytes);
  if (slot_buffer == nullptr) return false;
  if (header.bytes != 0) {
    transport::fill_slot_buffer(wire.can.store_hints, slot_buffer, slot, header.bytes);
  }
  if (line.way.peer_granted) return wire.can.regions->pass(header, passage);
  wire.channel->commit(header);
  return true;
}

// Releases outgoing slots on the device that the card has read.
bool HostProxy::free_read(Line& line) {
  if (!line.way.sends_direct) return false;
  bool moved = false;
  for (std::uint32_t channel = 0; channel < line.out.size(); ++channel) {
    Outgoing& out = line.out[channel];
    if (out.read == out.step) continue;
    transport::SourceRecord& sources = *line.wires[channel / options_.shape.shares].can.sources;
    const std::uint64_t before = out.read;
    while (out.read < out.step && !sources.reads(slot_of(out.end, out.read), stride_)) ++out.read;
    if (out.read != before) store_to(out.end.credit, out.read);
    moved |= out.read != before;
    waiting_ |= out.read < out.step;
  }
  return moved;
}

bool HostProxy::receive(Line& line) {
  bool moved = false;
  for (std::uint32_t number = 0; number < options_.shape.numbers; ++number) {
    auto& wire = line.link->recv_channel(number);
    for (const transport::Segment* segment = wire.peek(); segment != nullptr;
         segment = wire.peek()) {
      if (!take_segment(line, *segment)) {
        break_off(line, "it sent a segment that no device channel expects");
        return true;
      }
      wire.release();
      moved = true;
    }
  }
  return moved;
}

// Takes one segment; false if no device channel expects it.
bool HostProxy::take_segment(Line& line, const transport::Segment& segment) {
  const transport::SegmentHeader& header = segment.header;
  if (header.tag >= line.in.size() || header.bytes > stride_) return false;
  Incoming& in = line.in[header.tag];
  if (header.sequence != in.step || in.step >= load_of(in.end.credit) + kDepth) return false;
  if (segment.written_directly != line.way.receives_direct) return false;
  if (segment.written_directly) {
    pending_headers_.push_back({&line, in.end, in.step, header.agreement});
  } else {
    if (header.bytes != 0) copy_bytes(slot_of(in.end, in.step), segment.data, header.bytes);
    store_header(in.end, in.step, header.agreement);
  }
  ++in.step;
  return true;
}

// One flush serves all segments of a pass.
void HostProxy::publish_headers() {
  if (pending_headers_.empty()) return;
  const Status status = options_.flush ? options_.flush() : Status();
  for (const PendingHeader& one : pending_headers_) {
    if (status.ok()) {
      store_header(one.end, one.step, one.data);
    } else {
      break_off(*one.line, status.message());
    }
  }
  pending_headers_.clear();
}

bool HostProxy::give_back(Line& line) {
  if (line.link->state() != transport::LinkState::kOpen) return false;
  bool moved = false;
  for (std::uint32_t channel = 0; channel < line.in.size(); ++channel) {
    Incoming& in = line.in[channel];
    const std::uint64_t freed = load_of(in.end.credit);
    if (freed < in.reported + kSpaceStep) continue;
    auto& wire = line.link->send_channel(kSlotBufferChannel);
    if (wire.reserve(0) == nullptr) break;
    wire.commit({freed, 0, 0, channel});
    in.reported = freed;
    moved = true;
  }
  return moved;
}

bool HostProxy::hear_of_space(Line& line) {
  auto& wire = line.link->recv_channel(kSlotBufferChannel);
  bool moved = false;
  for (const transport::Segment* segment = wire.peek(); segment != nullptr; segment = wire.peek()) {
    const transport::SegmentHeader header = segment->header;
    wire.release();
    moved = true;
    if (header.tag >= line.out.size() || header.sequence > line.out[header.tag].step ||
        header.sequence < line.out[header.tag].freed) {
      break_off(line, "it released slots that were not in use");
      return true;
    }
    line.out[header.tag].freed = header.sequence;
  }
  return moved;
}

void HostProxy::break_off(Line& line, const std::string& why) {
  line.broken = true;
  const std::lock_guard<std::mutex> lock(telling_);
  if (lost_ >= 0) return;
  lost_ = static_cast<int>(line.way.peer);
  why_ = why;
}

Status HostProxy::describe_loss(const std::string& operation) const {
  const std::lock_guard<std::mutex> lock(telling_);
  if (lost_ < 0) return Status();
  return engine::peer_lost_verdict(lost_, why_, operation, options_.names);
}

void HostProxy::close(Nanoseconds patience) {
  const std::lock_guard<std::mutex> lock(closing_);
  leaves_by_.store(later(options_.clock->now(), patience));
  leaving_.store(true, std::memory_order_release);
  if (thread_.joinable()) thread_.join();
  for (const auto& wire : std::exchange(options_.wires, {})) wire->close();
}

}  // namespace pycoll::device
