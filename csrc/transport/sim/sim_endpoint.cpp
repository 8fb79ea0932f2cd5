#include "transport/sim/sim_endpoint.h"

#include "base/assert.h"

namespace pycoll::transport {

std::byte* SimSendChannel::reserve(std::size_t bytes) {
  PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "a segment of %zu bytes", bytes);
  SimPipe& pipe = SimWorld::pipe(wire_, number_);
  if (world_.dead(wire_.from) || !SimWorld::has_space(pipe)) return nullptr;
  pipe.reserved = true;
  pipe.reserved_bytes = bytes;
  return pipe.slot_buffer.at_least(kSegmentBytesMax);
}

void SimSendChannel::commit(const SegmentHeader& header) {
  if (world_.dead(wire_.from)) return;
  SimPipe& pipe = SimWorld::pipe(wire_, number_);
  PYCOLL_ASSERT(pipe.reserved && header.bytes <= pipe.reserved_bytes,
                "commit of %u bytes on channel %u from %d to %d, reserved: %zu", header.bytes,
                number_, wire_.from, wire_.to, pipe.reserved ? pipe.reserved_bytes : 0);
  pipe.reserved = false;
  world_.send(wire_, number_, header, nullptr);
}

bool SimSendChannel::hand_over(const SegmentHeader& header, const std::byte* data) {
  PYCOLL_ASSERT(header.bytes <= kSegmentBytesMax, "a segment of %u bytes", header.bytes);
  SimPipe& pipe = SimWorld::pipe(wire_, number_);
  if (world_.dead(wire_.from) || !SimWorld::has_space(pipe)) return false;
  pipe.reserved = false;
  world_.send(wire_, number_, header, data);
  return true;
}

bool SimSendChannel::drained() { return SimWorld::pipe(wire_, number_).reading == 0; }

const Segment* SimRecvChannel::peek() {
  SimPipe& pipe = SimWorld::pipe(wire_, number_);
  if (world_.dead(wire_.to) || pipe.released == pipe.shown) return nullptr;
  SimSlot& slot = pipe.slots[pipe.released % kChannelDepth];
  head_.header = slot.header;
  head_.data = slot.header.bytes != 0 ? slot.data.at_least(slot.header.bytes) : nullptr;
  return &head_;
}

void SimRecvChannel::release() {
  if (world_.dead(wire_.to)) return;
  const SimPipe& pipe = SimWorld::pipe(wire_, number_);
  PYCOLL_ASSERT(pipe.released < pipe.shown, "release of nothing on channel %u from %d to %d",
                number_, wire_.from, wire_.to);
  world_.release(wire_, number_);
}

SimLink::SimLink(SimWorld& world, int rank, int peer) : world_(world), rank_(rank), peer_(peer) {
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    sends_.emplace_back(world, rank, peer, number);
    recvs_.emplace_back(world, peer, rank, number);
  }
}

void SimLink::post(const Notice& notice) {
  if (!world_.dead(rank_)) world_.post(world_.wire(rank_, peer_), notice);
}

SimTransport::SimTransport(std::shared_ptr<SimWorld> world, int rank)
    : world_(std::move(world)), rank_(rank) {
  for (int peer = 0; peer < world_->options().size; ++peer) {
    links_.push_back(peer == rank ? nullptr : std::make_unique<SimLink>(*world_, rank, peer));
  }
}

Link* SimTransport::link(int peer) {
  const bool known = peer >= 0 && peer < world_->options().size;
  return known ? links_[static_cast<std::size_t>(peer)].get() : nullptr;
}

}  // namespace pycoll::transport
