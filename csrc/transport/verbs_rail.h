// One rail of a link: a queue pair over one port, and the memory that only it reads and writes: its
// share of the slots, and places for notices. VERBS.md says what goes over which rail.
//
// Threads: those of the Transport.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/verbs_ports.h"
#include "transport/verbs_queue.h"

namespace pycoll::transport::verbs {

class Rail {
 public:
  // Number `index` of `count` to `peer`. `port` outlives the rail.
  Rail(OpenPort& port, int peer, std::uint32_t index, std::uint32_t count);

  // Makes pair and areas; `own` gets what the peer's end wants. Called once.
  Status open(PeerAddress* own);
  // Whether `peer` is on this rail's kind of network, and a rail of this version.
  bool accepts(const PeerAddress& peer) const;

  // --- what a completion's number says (Queue::number_of)
  static int peer_of(std::uint32_t number) { return static_cast<int>(number / kRailsMax); }
  static std::uint32_t index_of(std::uint32_t number) { return number % kRailsMax; }

  std::uint32_t index() const { return index_; }
  Device& device() const { return *port_.device; }
  Registrations& registrations() const { return *port_.registrations; }
  // The transport's region with its keys here. Requires for these: it has bytes.
  const Region& region() const { return port_.region; }
  const ibv_mr& region_keys() const { return *port_.region_keys; }
  Queue& queue() { return queue_; }
  bool done(std::uint64_t position) const { return queue_.done(position); }

  // Offsets are equal in both areas. Requires: the segment takes this rail.
  std::size_t slot(std::uint32_t channel, std::uint32_t segment) const {
    return slot_offset(channel, segment, count_);
  }
  std::byte* outgoing(std::size_t offset) const { return outgoing_->at(offset); }
  std::byte* incoming(std::size_t offset) const { return incoming_->at(offset); }
  // Of the outgoing area.
  Piece piece(std::size_t offset, std::size_t bytes) const;

  // Of the segments that came last in either direction, whatever their channels.
  SegmentHeader last_sent;
  SegmentHeader last_received;
  // The peer has said that nothing follows here.
  bool ended = false;
  // Completions tell of errors, or are about to: nothing can be sent.
  bool broken = false;
  // With this position the peer has our goodbye.
  std::uint64_t goodbye_done_at = 0;

 private:
  OpenPort& port_;
  const std::uint32_t index_;
  const std::uint32_t count_;
  std::unique_ptr<Area> outgoing_;
  std::unique_ptr<Area> incoming_;
  Queue queue_;  // destroyed before the areas
};

}  // namespace pycoll::transport::verbs
