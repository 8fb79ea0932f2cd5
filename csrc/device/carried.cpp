#include "device/carried.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "device/network_memory.h"

namespace pycoll::device {
namespace {

// Texts one behind the other, each behind its length.
std::string join(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& one : texts) {
    const auto length = static_cast<std::uint32_t>(one.size());
    joined.append(reinterpret_cast<const char*>(&length), sizeof(length));
    joined += one;
  }
  return joined;
}

// False unless there are `count` of them.
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

}  // namespace

Carried::Carried(Options options) : options_(std::move(options)) {
  for (const std::uint32_t rank : options_.peers) {
    Peer& peer = peers_.emplace_back();
    peer.rank = rank;
    peer.wire = wire_to(options_.wires, static_cast<int>(rank));
  }
}

// Before the memory is used again for something else, cards must have let go of it.
Carried::~Carried() {
  for (const auto& wire : options_.wires) wire->close();
}

Status Carried::take(const std::function<Shape(std::uint32_t level)>& shape_of,
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

std::uint64_t Carried::host_bytes(const Shape& shape) const {
  std::uint64_t bytes = 0;
  for (const Peer& peer : peers_) {
    const auto staged =
        static_cast<std::uint64_t>(std::count(peer.direct.begin(), peer.direct.end(), false));
    bytes += carried_word_bytes(shape) + staged * carried_slot_bytes(shape);
  }
  return bytes;
}

// Once, for the largest channels that may have so much memory.
void Carried::take_direct(const Shape& shape, bool is_last) {
  const auto count =
      static_cast<std::uint64_t>(std::count_if(peers_.begin(), peers_.end(), leads_to_card));
  if (tried_direct_ || !options_.direct || count == 0) return;
  order_ = card_order(*options_.gpu);
  const bool lands = order_ != CardOrder::kNone;
  const std::uint64_t bytes = count * (lands ? 2 : 1) * carried_slot_bytes(shape);
  if (bytes > options_.memory_max && !is_last) return;
  tried_direct_ = true;
  const Status status = enter(bytes, lands);
  if (!status.ok()) {
    why_ = "is not reached by network cards (GPUDirect RDMA): " + status.message() +
           "; the host copies what it sends to other machines, and what comes";
    return;
  }
  if (!lands) {
    why_ =
        "is not written by network cards (GPUDirect RDMA): the CUDA driver neither keeps their "
        "writes in order nor lets the host flush them; the host copies what comes from other "
        "machines";
  }
  for (Peer& peer : peers_) {
    if (leads_to_card(peer)) peer.direct = {lands, true};
  }
}

// For the one wire that has regions.
Status Carried::enter(std::uint64_t bytes, bool lands) {
  Status status = Reserved::take(options_.gpu, Reserved::Kind::kDevice, bytes,
                                 "channels of network cards", &device_memory_);
  const auto wire = std::find_if(options_.wires.begin(), options_.wires.end(),
                                 [](const auto& one) { return one->has_regions(); });
  if (status.ok()) {
    status = enter_region(*options_.gpu, device_memory_.address(), device_memory_.bytes(), lands,
                          **wire);
  }
  if (!status.ok()) device_memory_ = {};
  return status;
}

Status Carried::agree(const Exchange& exchange, const Shape& shape) {
  shape_ = shape;
  lay_out();
  // Why slots are staged, then what each rank is granted.
  std::vector<std::string> mine(options_.size + 1);
  mine[0] = why_;
  for (const Peer& peer : peers_) {
    if (!peer.direct[kIn]) continue;
    mine[1 + peer.rank] = peer.wire->link(static_cast<int>(peer.rank))
                              ->grant(peer.lands_at, carried_slot_bytes(shape_));
  }
  std::vector<std::string> told;
  Status status = exchange_or_fail(exchange, Status(), join(mine), options_.names, &told);
  if (!status.ok()) return status;
  // What a rank cannot take all must hear of, since more exchanges follow.
  status = learn(told);
  return exchange_or_fail(exchange, status, std::string(), options_.names, &told);
}

Status Carried::learn(const std::vector<std::string>& told) {
  std::vector<std::vector<std::string>> all(options_.size);
  for (std::uint32_t rank = 0; rank < options_.size; ++rank) {
    if (!split(told[rank], options_.size + 1, &all[rank])) {
      return Status::error(Code::kTransport,
                           "device arrays: ranks run different versions of pycoll");
    }
    reasons_.push_back(all[rank][0]);
  }
  for (Peer& peer : peers_) {
    const std::string& grant = all[peer.rank][1 + options_.rank];
    if (grant.empty() || peer.wire == nullptr) continue;
    Status status = peer.wire->link(static_cast<int>(peer.rank))->accept(grant);
    if (!status.ok()) return status;
    peer.places = true;
  }
  return Status();
}

void Carried::lay_out() {
  std::uint64_t at = 0;
  std::uint64_t in_region = 0;
  for (Peer& peer : peers_) {
    peer.host.words = memory_.host() + at;
    peer.device.words = memory_.pointer<std::byte>(at);
    std::fill_n(peer.host.words, carried_word_bytes(shape_), std::byte{0});
    at += carried_word_bytes(shape_);
    for (const std::size_t way : {kIn, kOut}) {
      if (peer.direct[way]) {
        if (way == kIn) peer.lands_at = in_region;
        peer.host.slots[way] = peer.device.slots[way] =
            device_memory_.pointer<std::byte>(in_region);
        in_region += carried_slot_bytes(shape_);
      } else {
        peer.host.slots[way] = memory_.host() + at;
        peer.device.slots[way] = memory_.pointer<std::byte>(at);
        at += carried_slot_bytes(shape_);
      }
    }
  }
}

Status Carried::make_carrier(const std::shared_ptr<Clock>& clock,
                             std::unique_ptr<Carrier>* carrier) {
  if (peers_.empty()) {
    options_.wires.clear();
    return Status();
  }
  Carrier::Options made;
  made.shape = shape_;
  made.names = options_.names;
  made.clock = clock;
  for (const Peer& peer : peers_) {
    made.ways.push_back({peer.rank, peer.host, peer.direct[kOut], peer.direct[kIn], peer.places});
  }
  if (order_ == CardOrder::kFlushed) {
    made.flush = [gpu = options_.gpu] { return flush_card_writes(*gpu); };
  }
  made.wires = std::exchange(options_.wires, {});
  return Carrier::create(std::move(made), carrier);
}

void Carried::point(std::span<Port> ports) const {
  for (const Peer& peer : peers_) carry_ports(shape_, peer.rank, peer.device, ports);
}

void Carried::abandon() {
  memory_.abandon();
  device_memory_.abandon();
}

}  // namespace pycoll::device
