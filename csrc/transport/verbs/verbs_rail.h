// One rail of a link: a queue pair over one port, and the memory that only this pair reads and
// writes: its share of the slots, and places for notices. VERBS.md says which messages use which
// rail.
//
// Threads: those of the Transport.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/verbs/verbs_ports.h"
#include "transport/verbs/verbs_queue.h"

namespace pycoll::transport::verbs {

class Rail {
 public:
  // Rail number `index` of `count` to `peer`. `port` outlives the rail.
  Rail(OpenPort& port, int peer, std::uint32_t index, std::uint32_t count);

  // Makes the queue pair and the areas; `own` receives the address for the peer. Called once.
  Status open(PeerAddress* own);
  // Whether `peer` is an address of this protocol version on this rail's kind of network.
  bool accepts(const PeerAddress& peer) const;

  // --- decoding of a completion's number (Queue::number_of)
  static int peer_of(std::uint32_t number) { return static_cast<int>(number / kRailsMax); }
  static std::uint32_t index_of(std::uint32_t number) { return number % kRailsMax; }

  std::uint32_t index() const { return index_; }
  Device& device() const { return *port_.device; }
  Registrations& registrations() const { return *port_.registrations; }
  // The transport's region with its keys at this port. Requires, for both: the region has bytes.
  const Region& region() const { return port_.region; }
  const ibv_mr& region_keys() const { return *port_.region_keys; }
  Queue& queue() { return queue_; }
  bool done(std::uint64_t position) const { return queue_.done(position); }

  // Offset of a slot, equal in both areas. Requires: the segment takes this rail.
  std::size_t slot(std::uint32_t channel, std::uint32_t segment) const {
    return slot_offset(channel, segment, count_);
  }
  std::byte* outgoing(std::size_t offset) const { return outgoing_->at(offset); }
  std::byte* incoming(std::size_t offset) const { return incoming_->at(offset); }
  // A piece of the outgoing area.
  Piece piece(std::size_t offset, std::size_t bytes) const;

  // The headers of the last segments in both directions, of any channel.
  SegmentHeader last_sent;
  SegmentHeader last_received;
  // The peer's goodbye has arrived on this rail.
  bool ended = false;
  // Completions report errors, or soon will: nothing can be sent.
  bool broken = false;
  // Once this position is done, the peer has this rank's goodbye.
  std::uint64_t goodbye_done_at = 0;

 private:
  OpenPort& port_;
  const std::uint32_t index_;
  const std::uint32_t count_;
  std::unique_ptr<Area> outgoing_;
  std::unique_ptr<Area> incoming_;
  Queue queue_;  // declared last, so that it is destroyed before the areas
};

}  // namespace pycoll::transport::verbs
