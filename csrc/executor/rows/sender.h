// The three ways in which a row's segment reaches a peer: copied into a slot buffer, exposed for
// the peer to read in place, or written into the peer's write window.
//
// With a direct write the sender writes a segment to where the receiver's row would copy it. The
// plan must allow it (flag 8 in FORMAT.md), the medium must support it, and the receiver must have
// opened a write window.
#pragma once

#include <cstddef>
#include <cstdint>

#include "executor/bound_plan.h"
#include "executor/lane_walk.h"
#include "executor/ports.h"
#include "executor/request.h"
#include "executor/rows/gathered.h"
#include "plan/direct_writes.h"
#include "transport/transport.h"

namespace pycoll::executor {

// The segment that a row sends.
struct Outgoing {
  const BoundRow& bound;
  const transport::SegmentHeader& header;
  std::size_t skip;  // bytes from the beginning of the chunk to the segment
};

// One thread at a time. No function allocates.
class Sender {
 public:
  // Keeps pointers to its arguments. `is_long`: segments are long enough to be exposed or written
  // directly.
  void bind(const CollectiveRequest& request, const BoundPlan& bound, const Ports& ports,
            bool is_long);

  // Sends local memory unchanged, without a copy where the medium can; false if some send remains.
  // `lane` records which sends are done, for the next attempt.
  [[nodiscard]] bool hand_over(const Outgoing& out, const Gathered& gathered, Lane* lane) const;

  // Reserves a slot buffer in every channel that needs a copy of its own; false if a channel is
  // full.
  [[nodiscard]] bool reserve(const Outgoing& out, Gathered* all) const;
  // Sends the contents of the slot buffers, windows or target as the next segments.
  void commit(const Outgoing& out, const Gathered& all) const;

  // The same for a row with codes: each send has a slot buffer, of codes or of values.
  [[nodiscard]] bool reserve_coded(const plan::Row& row, std::size_t bytes, std::size_t code_bytes,
                                   Gathered* all) const;
  void commit_coded(const plan::Row& row, transport::SegmentHeader header,
                    std::size_t code_bytes) const;

  // Whether send number `i` of the row must wait until its peer has said whether it opens a window.
  bool awaits_answer(const plan::Row& row, int i, const transport::SegmentHeader& header) const;

 private:
  std::byte* find_window(const Outgoing& out, int i) const;
  bool exposes(const Outgoing& out, int i, const std::byte* data) const;
  bool is_fetched(const Outgoing& out, int i, const Gathered& gathered) const;
  bool repeats(const plan::Row& row, int i, std::uint32_t apart) const;
  bool repeat(const Outgoing& out, int i) const;

  const Ports* ports_ = nullptr;
  const BoundPlan* bound_ = nullptr;
  // nullptr if no segment is long enough for a direct write.
  const plan::DirectWrites* direct_writes_ = nullptr;
  // Whether input and output are one array each. The addresses of several arrays are virtual
  // (combiner.h), so no peer can read there.
  bool is_one_array_ = true;
};

}  // namespace pycoll::executor
