#include "device/channels/proxied.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "device/channels/probe.h"
#include "device/host_proxy/network_memory.h"

namespace pycoll::device {
namespace {

// Joins the texts, each behind its length in four bytes.
std::string join(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& one : texts) {
    const auto length = static_cast<std::uint32_t>(one.size());
    joined.append(reinterpret_cast<const char*>(&length), sizeof(length));
    joined += one;
  }
  return joined;
}

// The inverse of join(). Returns false unless there are `count` texts.
bool split(std::string_view joined, std::size_t count, std::vector<std::string>* texts) {
  texts->clear();
  while (!joined.empty()) {
    std::uint32_t length = 0;
    if (joined.size() < sizeof(length)) return false;
    std::memcpy(&length, joined.data(), sizeof(length));
    joined.remove_prefix(sizeof(length));
    if (joined.size() < length) return false;
    texts->emplace_back(joined.substr(0, length));
    joined.remove_prefix(length);
  }
  return texts->size() == count;
}

// Limit of the trial. Longer than a queue pair tries to reach a peer, so its error comes first.
constexpr Nanoseconds kTrialLasts = 30'000'000'000;
constexpr std::chrono::microseconds kTrialRest{20};
constexpr const char* kMisread =
    "network cards deliver other bytes than were sent: most likely an IOMMU or ACS redirects them "
    "(turn both off, or pass the IOMMU through), or the CUDA driver does not know of their way";

}  // namespace

Proxied::Proxied(Options options) : options_(std::move(options)) {
  for (const std::uint32_t rank : options_.peers) {
    Peer& peer = peers_.emplace_back();
    peer.rank = rank;
    peer.wire = wire_to(options_.wires, static_cast<int>(rank));
    if (peer.wire != nullptr) peer.regions = peer.wire->capabilities().regions;
  }
}

// Cards must release the memory before anything else reuses it.
Proxied::~Proxied() {
  for (const auto& wire : options_.wires) wire->close();
}

Status Proxied::take(const std::function<Shape(std::uint32_t level)>& shape_of,
                     std::uint32_t* level) {
  for (;; ++*level) {
    shape_ = shape_of(*level);
    if (peers_.empty()) return Status();
    const bool is_last = *level + 1 >= kLevels;
    take_direct(shape_, is_last);
    const std::uint64_t bytes = host_bytes(shape_);
    if (bytes > options_.memory_max && !is_last) continue;
    Status status = Reserved::take(
        options_.gpu, Reserved::Kind::kHost, bytes,
        "channels to " + std::to_string(peers_.size()) + " peers out of reach", &memory_);
    if (status.ok() || is_last) return status;
  }
}

std::uint64_t Proxied::host_bytes(const Shape& shape) const {
  std::uint64_t bytes = 0;
  for (const Peer& peer : peers_) {
    const auto staged =
        static_cast<std::uint64_t>(std::count(peer.direct.begin(), peer.direct.end(), false));
    bytes += proxied_word_bytes(shape) + staged * proxied_slot_bytes(shape);
  }
  return bytes;
}

// Runs once, for the largest channels that fit in memory_max.
void Proxied::take_direct(const Shape& shape, bool is_last) {
  const auto count =
      static_cast<std::uint64_t>(std::count_if(peers_.begin(), peers_.end(), leads_to_card));
  if (tried_direct_ || !options_.direct || count == 0) return;
  order_ = card_order(*options_.gpu);
  const bool cards_write = order_ != CardOrder::kNone;
  const std::uint64_t bytes = count * (cards_write ? 2 : 1) * proxied_slot_bytes(shape);
  if (bytes > options_.memory_max && !is_last) return;
  tried_direct_ = true;
  const Status status = enter(bytes, cards_write);
  if (!status.ok()) {
    why_ = "is not reached by network cards (GPUDirect RDMA): " + status.message() +
           "; the host copies the data that it exchanges with other machines";
    return;
  }
  if (!cards_write) {
    why_ =
        "is not written by network cards (GPUDirect RDMA): the CUDA driver neither keeps their "
        "writes in order nor lets the host flush them; the host copies the data that comes from "
        "other machines";
  }
  for (Peer& peer : peers_) {
    if (leads_to_card(peer)) peer.direct = {cards_write, true};
  }
}

// Reserves device memory for the slots and enters it in the one wire (transport) that has regions.
Status Proxied::enter(std::uint64_t bytes, bool cards_write) {
  Status status = Reserved::take(options_.gpu, Reserved::Kind::kDevice, bytes,
                                 "channels of network cards", &device_memory_);
  if (status.ok()) {
    const auto peer = std::find_if(peers_.begin(), peers_.end(), leads_to_card);
    status = enter_region(*options_.gpu, device_memory_.address(), device_memory_.bytes(),
                          cards_write, *peer->regions);
  }
  if (!status.ok()) device_memory_ = {};
  return status;
}

Status Proxied::agree(const Exchange& exchange, const Shape& shape) {
  shape_ = shape;
  lay_out();
  // The reason why slots are staged in host memory, then the grant to each rank.
  std::vector<std::string> mine(options_.size + 1);
  mine[0] = why_;
  for (const Peer& peer : peers_) {
    if (!peer.direct[kIn]) continue;
    mine[1 + peer.rank] = peer.regions->grant(static_cast<int>(peer.rank), peer.region_offset,
                                              proxied_slot_bytes(shape_));
  }
  std::vector<std::string> received;
  Status status = exchange_or_fail(exchange, Status(), join(mine), options_.names, &received);
  if (!status.ok()) return status;
  // All ranks must learn of a rank that cannot accept a grant, since more exchanges follow.
  status = learn(received);
  return exchange_or_fail(exchange, status, std::string(), options_.names, &received);
}

Status Proxied::learn(const std::vector<std::string>& received) {
  std::vector<std::vector<std::string>> all(options_.size);
  for (std::uint32_t rank = 0; rank < options_.size; ++rank) {
    if (!split(received[rank], options_.size + 1, &all[rank])) {
      return Status::error(Code::kTransport,
                           "device arrays: ranks run different versions of pycoll");
    }
    reasons_.push_back(all[rank][0]);
  }
  for (Peer& peer : peers_) {
    const std::string& grant = all[peer.rank][1 + options_.rank];
    if (grant.empty() || peer.wire == nullptr) continue;
    if (peer.regions == nullptr) {
      return Status::error(Code::kInvalidArgument, std::to_string(grant.size()) +
                                                       " bytes are no grant: there are no regions");
    }
    Status status = peer.regions->accept(static_cast<int>(peer.rank), grant);
    if (!status.ok()) return status;
    peer.peer_granted = true;
  }
  return Status();
}

void Proxied::lay_out() {
  std::uint64_t at = 0;
  std::uint64_t in_region = 0;
  for (Peer& peer : peers_) {
    peer.host.words = memory_.host() + at;
    peer.device.words = memory_.pointer<std::byte>(at);
    std::fill_n(peer.host.words, proxied_word_bytes(shape_), std::byte{0});
    at += proxied_word_bytes(shape_);
    for (const std::size_t way : {kIn, kOut}) {
      if (peer.direct[way]) {
        if (way == kIn) peer.region_offset = in_region;
        peer.host.slots[way] = peer.device.slots[way] =
            device_memory_.pointer<std::byte>(in_region);
        in_region += proxied_slot_bytes(shape_);
      } else {
        peer.host.slots[way] = memory_.host() + at;
        peer.device.slots[way] = memory_.pointer<std::byte>(at);
        at += proxied_slot_bytes(shape_);
      }
    }
  }
}

Status Proxied::make_host_proxy(const std::shared_ptr<Clock>& clock,
                                std::unique_ptr<HostProxy>* host_proxy) {
  if (peers_.empty()) {
    options_.wires.clear();
    return Status();
  }
  HostProxy::Options made;
  made.shape = shape_;
  made.names = options_.names;
  made.clock = clock;
  for (const Peer& peer : peers_) {
    made.ways.push_back(
        {peer.rank, peer.host, peer.direct[kOut], peer.direct[kIn], peer.peer_granted});
  }
  if (order_ == CardOrder::kFlushed) {
    made.flush = [gpu = options_.gpu] { return flush_card_writes(*gpu); };
  }
  made.wires = std::exchange(options_.wires, {});
  return HostProxy::create(std::move(made), host_proxy);
}

void Proxied::point(std::span<Port> ports) const {
  for (const Peer& peer : peers_) point_proxied_ports(shape_, peer.rank, peer.device, ports);
}

void Proxied::abandon() {
  memory_.abandon();
  device_memory_.abandon();
}

// Tests whether cards read and write device memory correctly: each pair sends one segment both
// ways, as the host proxy will, with a pattern that kernels write and read.

// The segments of one pair, one each way.
struct Proxied::Trial {
  Peer* peer;
  transport::Link* link;
  transport::SendCapabilities can;  // of channel 0, over which it sends
  bool sent = false;
  bool came = false;
};

Status Proxied::try_cards(const Exchange& exchange, Upload& upload, Clock& clock,
                          std::vector<std::string>* faults) {
  std::vector<Trial> trials;
  for (Peer& peer : peers_) {
    if (!leads_to_card(peer)) continue;
    transport::Link* link = peer.wire->link(static_cast<int>(peer.rank));
    trials.push_back({&peer, link, link->send_channel(0).capabilities()});
  }
  std::string fault;
  const Status status = trials.empty() ? Status() : run_trials(trials, upload, clock, &fault);
  return exchange_or_fail(exchange, status, fault, options_.names, faults);
}

Status Proxied::run_trials(std::vector<Trial>& trials, Upload& upload, Clock& clock,
                           std::string* fault) {
  for (const Trial& one : trials) {
    bool agrees = false;
    Status status = write_pattern(upload, find_probed(options_.rank, *one.peer, kOut), &agrees);
    if (!status.ok()) return status;
  }
  const Nanoseconds deadline = clock.now() + kTrialLasts;
  // Continues after a fault: peers wait for segments that they have not received.
  for (std::size_t open = trials.size(); open != 0;) {
    bool moved = false;
    for (const auto& wire : options_.wires) moved |= wire->poll();
    open = 0;
    for (Trial& one : trials) {
      advance(one, upload, fault);
      open += is_over(one) ? 0 : 1;
    }
    if (open != 0 && clock.now() >= deadline) {
      *fault = "no segment came from network cards for " +
               std::to_string(kTrialLasts / 1'000'000'000) + " s";
      return Status();
    }
    if (!moved) std::this_thread::sleep_for(kTrialRest);
  }
  return Status();
}

bool Proxied::is_over(const Trial& trial) const {
  if (trial.link->state() != transport::LinkState::kOpen) return true;
  if (!trial.sent || !trial.came) return false;
  return !trial.can.sources->reads(trial.peer->host.slots[kOut], trial_bytes());
}

void Proxied::advance(Trial& trial, Upload& upload, std::string* fault) {
  if (!trial.sent) trial.sent = send_trial(trial);
  if (trial.came) return;
  auto& wire = trial.link->recv_channel(0);
  const transport::Segment* segment = wire.peek();
  if (segment == nullptr) {
    const bool is_lost = trial.link->state() != transport::LinkState::kOpen;
    if (is_lost && fault->empty()) *fault = trial.link->reason();
    return;
  }
  trial.came = true;
  bool agrees = false;
  const Status status = read_trial(trial, *segment, upload, &agrees);
  wire.release();
  if (!agrees) *fault = status.ok() ? kMisread : status.message();
}

// Takes a segment as the host proxy does.
Status Proxied::read_trial(const Trial& trial, const transport::Segment& segment, Upload& upload,
                           bool* agrees) const {
  const Peer& peer = *trial.peer;
  if (segment.written_directly != peer.direct[kIn] || segment.header.bytes != trial_bytes())
    return Status();
  Status status;
  if (!segment.written_directly) {
    std::memcpy(peer.host.slots[kIn], segment.data, trial_bytes());
  } else if (order_ == CardOrder::kFlushed) {
    status = flush_card_writes(*options_.gpu);
  }
  if (!status.ok()) return status;
  return read_pattern(upload, find_probed(peer.rank, peer, kIn), agrees);
}

bool Proxied::send_trial(const Trial& trial) const {
  const Peer& peer = *trial.peer;
  auto& wire = trial.link->send_channel(0);
  const transport::SegmentHeader header{0, 0, trial_bytes(), 0};
  transport::Passage passage;
  if (peer.peer_granted) passage.to = 0;
  if (peer.direct[kOut]) {
    passage.from = peer.host.slots[kOut];
    return trial.can.regions->pass(header, passage);
  }
  std::byte* slot_buffer = wire.reserve(header.bytes);
  if (slot_buffer == nullptr) return false;
  transport::fill_slot_buffer(trial.can.store_hints, slot_buffer, peer.host.slots[kOut],
                              header.bytes);
  if (peer.peer_granted) return trial.can.regions->pass(header, passage);
  wire.commit(header);
  return true;
}

std::uint32_t Proxied::trial_bytes() const {
  return shape_.segment_bytes[static_cast<std::size_t>(Protocol::kSimple)];
}

// The probe of this rank's first slot in the direction `way`; its pattern is the one of `writer`.
Probed Proxied::find_probed(std::uint32_t writer, const Peer& peer, std::size_t way) const {
  const std::uint32_t reader = writer == options_.rank ? peer.rank : options_.rank;
  return {writer, reader, std::bit_cast<Address>(peer.device.slots[way]), trial_bytes()};
}

}  // namespace pycoll::device
