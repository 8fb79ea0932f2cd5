// The peers of an execution in progress: the ones that it waits for, and the ones that have entered
// the operation. The engine asks when it looks for lost or late ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "executor/bound_plan.h"
#include "executor/lane_walk.h"
#include "executor/ports.h"
#include "executor/rows/sender.h"
#include "plan/plan.h"
#include "transport/transport.h"

namespace pycoll::executor {

// A view of the parts of one execution, which outlives it. Functions may visit a peer several
// times.
class PeerWaits {
 public:
  PeerWaits(const BoundPlan& bound, const LaneWalk& lanes, const Ports& ports, const Sender& sender,
            const transport::SegmentHeader& header)
      : bound_(bound), lanes_(lanes), ports_(ports), sender_(sender), header_(header) {}

  // Calls visit(peer) for every peer that a blocked lane waits for directly: the peer has not sent
  // a segment, or has not taken one.
  template <typename Visit>
  void visit_waits(Visit visit) const {
    for (std::size_t number = 0; number < lanes_.size(); ++number) {
      const Lane& lane = lanes_[number];
      if (lane.has_ended()) continue;
      const plan::Row& row = row_at(lane.next);
      // A peer whose segment has arrived is not waited for: it may have closed in good order.
      visit_missing(row, visit);
      for (int i = 0; i < row.send_count; ++i) visit(ports_[row.send[i]].peer);
    }
    ports_.visit_readers(visit);  // all rows may have run while a peer still reads exposed memory
  }

  // Calls visit(peer) for every peer that blocks a lane: its segment is missing or, where all
  // segments have arrived, its channel is full or its answer about a write window is missing. Peers
  // that still read memory count where a flush, or the end of all lanes, waits for them.
  template <typename Visit>
  void visit_blocking(Visit visit) const {
    bool all_ended = true;
    for (std::size_t number = 0; number < lanes_.size(); ++number) {
      const Lane& lane = lanes_[number];
      if (lane.has_ended()) continue;
      all_ended = false;
      if (lanes_.waits_for_leading(number)) continue;
      const plan::Row& row = row_at(lane.next);
      if (visit_missing(row, visit)) continue;
      for (int i = 0; i < row.send_count; ++i) {
        const Port& port = ports_[row.send[i]];
        if ((lane.handed_over >> i & 1) != 0) continue;
        const bool waits = sender_.awaits_answer(row, i, header_);
        if (waits || port.send->reserve(0) == nullptr) visit(port.peer);
      }
      if ((row.flags & plan::kFlagFlush) != 0) ports_.visit_readers(visit);
    }
    if (all_ended) ports_.visit_readers(visit);
  }

  // Calls visit(peer) for every peer that is known to have entered this operation: a segment of the
  // operation has come from it, or more segments have gone to it than any channel holds.
  template <typename Visit>
  void visit_heard(Visit visit) const {
    constexpr std::uint64_t kTilesFar = 64;  // more than the depth of the channels of any medium
    for (std::size_t number = 0; number < lanes_.size(); ++number) {
      const Lane& lane = lanes_[number];
      const std::uint32_t end = lane.tile == 0 ? lane.next : lane.end;
      for (std::uint32_t index = lane.begin; index < end; ++index) {
        const plan::Row& row = row_at(index);
        // A token runs in the last tile only.
        if (row.chunk == plan::kToken && lanes_.tiles() != 1) continue;
        for (int i = 0; i < row.recv_count; ++i) visit(ports_[row.recv[i]].peer);
        for (int i = 0; lane.tile > kTilesFar && i < row.send_count; ++i) {
          visit(ports_[row.send[i]].peer);
        }
      }
    }
  }

 private:
  const plan::Row& row_at(std::uint32_t index) const { return *bound_.rows()[index].row; }

  // Visits the peers whose segments for the row have not arrived; false if all have.
  template <typename Visit>
  bool visit_missing(const plan::Row& row, Visit& visit) const {
    bool any = false;
    for (int i = 0; i < row.recv_count; ++i) {
      const Port& port = ports_[row.recv[i]];
      if (port.recv->peek() != nullptr) continue;
      visit(port.peer);
      any = true;
    }
    return any;
  }

  const BoundPlan& bound_;
  const LaneWalk& lanes_;
  const Ports& ports_;
  const Sender& sender_;
  const transport::SegmentHeader& header_;
};

}  // namespace pycoll::executor
