// The host executor: runs one bound plan in small steps. It never blocks, allocates or starts a
// thread. advance() runs the rows that can run now and returns. The same code therefore serves a
// blocking call, a progress thread and a simulator that steps many ranks in one thread.
//
//   for each tile, for each row:
//     wait for segments and slot buffers -> combine -> fill target and slot buffers -> release
//
// Each lane runs through its own rows and tiles, independently of the other lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "executor/bound_plan.h"
#include "executor/lane_walk.h"
#include "executor/peer_waits.h"
#include "executor/ports.h"
#include "executor/request.h"
#include "executor/rows/code_combiner.h"
#include "executor/rows/combiner.h"
#include "executor/rows/sender.h"
#include "executor/wire_memory.h"
#include "shared_memory/shm_arena.h"

namespace pycoll::executor {

enum class Progress : std::uint8_t {
  kBlocked,   // nothing moved
  kMoved,     // something moved, more remains
  kDone,      // every row of every tile has run
  kDisagree,  // a segment of another operation arrived
  kSpoiled,   // the user's reduction failed; its result was not sent
};

// One thread at a time. Reusable: start() begins anew and keeps capacity.
//
// Several executions may be in progress over the same channels. Each channel serves them in the
// order of their begin(), so an earlier execution finds the channels as if it were alone. The
// caller of begin() checks that the memory of these executions allows that.
class Execution {
 public:
  Execution() = default;
  Execution(const Execution&) = delete;  // its parts point to each other
  Execution& operator=(const Execution&) = delete;

  // Binds and begins. The execution keeps the request until the next start.
  Status start(CollectiveRequest request, std::uint64_t sequence, ChannelSource& channels);

  // The two halves of start(), for a collective that runs many times. bind() does all that
  // is the same for every run. begin() starts one run with other memory of the same
  // lengths, and allocates nothing. begin() requires that bind() succeeded and that no
  // earlier run of this execution is in progress.
  Status bind(CollectiveRequest request, ChannelSource& channels);
  void begin(std::uint64_t sequence, const std::byte* input, std::byte* output);

  // Runs at most kRowsPerAdvance rows of each lane, so that
  // the caller can check other events in between.
  Progress advance();
  static constexpr int kRowsPerAdvance = 64;

  const CollectiveRequest& request() const { return request_; }
  // Grows with every row that has run.
  std::uint64_t progress() const { return lanes_.rows_run(); }
  // Whether this execution counts in ChannelSource::traversals(): it has several tiles, and its
  // plan alternates.
  bool traversals() const { return lanes_.tiles() > 1 && request_.plan->alternates(); }
  // Whether a peer has sent segments of a later operation where a segment of this one is expected.
  bool is_overtaken() const { return overtaken_; }
  // The peers that this execution waits for.
  PeerWaits peer_waits() const { return {bound_, lanes_, ports_, sender_, header_}; }

  // Cancels an execution before its end, as if it had not begun. The executions behind it get its
  // channels, which still hold the segments that it has sent or has yet to receive. Requires: no
  // execution that began earlier is in progress, and can_drop().
  void drop();
  // Whether no peer reads or writes this execution's memory from
  // now on. `input` and `output` are that memory.
  bool can_drop(const std::byte* input, const std::byte* output) const;
  // Releases the arena memory. Call it when the execution has ended without kDone and peers neither
  // read nor write its memory.
  void forget_memory() { held_.clear(); }

 private:
  struct Arrived;

  void hold_memory(const std::byte* input, const std::byte* output);
  void open_windows() const;
  Progress advance_lane(std::size_t number, int rows);
  // Never inlined: between the loops of its callers the compiler would keep fewer of the row's
  // values in registers.
  [[gnu::noinline]] Progress run_row(Lane& lane);
  Progress take(const plan::Row& row, std::size_t bytes, std::size_t code_bytes, Arrived* all);
  [[nodiscard]] bool skips(const Port& port, std::uint64_t sequence) const;
  [[nodiscard]] bool is_read(const std::byte* target, std::size_t bytes) const;
  Progress send_row(const Outgoing& out, std::uint64_t length, bool exposed, Lane* lane,
                    Gathered* all) const;
  Progress send_coded_row(const Outgoing& out, Range segment, bool exposed, Gathered* all) const;
  bool intact(const plan::Row& row) const;

  // Short operations read mostly the first members, which share few cache lines.
  transport::SegmentHeader header_;  // of the segments that the current row sends
  ChannelSource* channels_ = nullptr;
  bool overtaken_ = false;      // as of the last advance()
  bool is_long_ = false;        // segments are long enough to be exposed or written directly
  bool opens_windows_ = false;  // peers may write directly into the output
  Ports ports_;
  LaneWalk lanes_;
  Sender sender_;
  Combiner combiner_;
  BoundPlan bound_;
  WireMemory wire_;
  CollectiveRequest request_;  // counts wire elements if it has a wire form
  CodeCombiner code_combiner_;
  std::vector<transport::shm::Hold> held_;
};

}  // namespace pycoll::executor
