#include "device/host_proxy/proxied.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "device/host_proxy/network_memory.h"

namespace pycoll::device {
namespace {

// Joins the texts, each behind its length.
std::string join(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& one : texts) {
    const auto length = static_cast<std::uint32_t>(one.size());
    joined.append(reinterpret_cast<const char*>(&length), sizeof(length));
    joined += one;
  }
  return joined;
}

// False unless there are `count` texts.
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

// Enters the memory in the one wire that has regions.
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

}  // namespace pycoll::device
