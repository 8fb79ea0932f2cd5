#include "transport/verbs/verbs_rail.h"

namespace pycoll::transport::verbs {

Rail::Rail(OpenPort& port, int peer, std::uint32_t index, std::uint32_t count)
    : port_(port),
      index_(index),
      count_(count),
      queue_(*port.device, static_cast<std::uint32_t>(peer) * kRailsMax + index, count) {}

Status Rail::open(PeerAddress* own) {
  const std::size_t bytes = area_bytes(count_);
  Status status = Area::make(device(), bytes, 0, &outgoing_);
  if (!status.ok()) return status;
  const int writable = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  status = Area::make(device(), bytes, writable, &incoming_);
  if (!status.ok()) return status;
  status = queue_.open();
  if (!status.ok()) return status;
  *own = queue_.address();
  own->area = reinterpret_cast<std::uint64_t>(incoming_->at(0));
  own->rkey = incoming_->remote_key();
  return {};
}

bool Rail::accepts(const PeerAddress& peer) const {
  return peer.magic == PeerAddress::kMagic && peer.mtu >= IBV_MTU_256 && peer.mtu <= IBV_MTU_4096 &&
         peer.link_layer == device().port_facts().link_layer;
}

Piece Rail::piece(std::size_t offset, std::size_t bytes) const {
  return {outgoing_->at(offset), static_cast<std::uint32_t>(bytes), outgoing_->local_key(), offset};
}

}  // namespace pycoll::transport::verbs
