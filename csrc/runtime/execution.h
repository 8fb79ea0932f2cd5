// The host executor: runs one bound plan, a little at a time. It never blocks, allocates or starts
// a thread; advance() does what can be done now and returns, so the same code serves a blocking
// call, a progress thread and a simulator that steps many ranks in one thread.
//
//   for tile: for row: wait for segments and room -> combine -> target, send rooms -> release
//
// Lanes run through their own rows and tiles independently of each other.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/landings.h"
#include "runtime/bound_plan.h"
#include "runtime/request.h"
#include "runtime/sweep.h"
#include "runtime/wire_memory.h"
#include "transport/shm_arena.h"
#include "transport/transport.h"

namespace pycoll::runtime {

// Who may use one end of a channel: executions take it in the order in which they began, each when
// the one before is through with it. Both counts only grow.
struct Turn {
  std::uint64_t issued = 0;  // executions that have begun
  std::uint64_t served = 0;  // of those, how many are through
};

// Finds the channels of a plan, and whose turn it is; implemented by the engine over its links.
class ChannelSource {
 public:
  virtual ~ChannelSource() = default;
  virtual transport::SendChannel& send_channel(int peer, std::uint32_t number) = 0;
  virtual transport::RecvChannel& recv_channel(int peer, std::uint32_t number) = 0;
  // Outlive every execution that was bound to them.
  virtual Turn& send_turn(int peer, std::uint32_t number) = 0;
  virtual Turn& recv_turn(int peer, std::uint32_t number) = 0;
  // How many executions of several tiles have begun; they count themselves. The same on all ranks
  // for the same execution, since all begin them in the same order.
  virtual std::uint64_t& sweeps() = 0;
  // Whether this operation has ended on all ranks because one of them refused it: what is left of
  // it in channels belongs to nobody.
  virtual bool is_dropped(std::uint64_t sequence) const = 0;
};

enum class Progress : std::uint8_t {
  kBlocked,   // nothing moved
  kMoved,     // something moved, more remains
  kDone,      // every row of every tile has run
  kDisagree,  // a segment of another operation arrived; odd_peer() sent it
  kSpoiled,   // the user's reduction failed; nothing was sent of what it left
};

// One thread at a time. Reusable: start() begins anew and keeps capacity.
//
// Several executions may be under way over the same channels. Each channel serves them in the order
// of their begin(), so that an earlier one finds the channels as if it were alone; whether their
// memory allows that is for whoever begins them to know.
class Execution {
 public:
  // Binds and resolves. The request (moved in) is held until the next start.
  Status start(CollectiveRequest request, std::uint64_t sequence, ChannelSource& channels);

  // The two halves of start(), for what is run again and again: bind() does all that need not be
  // done anew; begin() enters the bound collective with other memory of the same lengths, and
  // allocates nothing. Requires of begin(): bind() succeeded, and no earlier run of this execution
  // is under way.
  Status bind(CollectiveRequest request, ChannelSource& channels);
  void begin(std::uint64_t sequence, const std::byte* input, std::byte* output);

  // At most kRowsPerAdvance rows of each lane, so that whoever drives can look up in between.
  Progress advance();
  static constexpr int kRowsPerAdvance = 64;

  const CollectiveRequest& request() const { return request_; }
  std::uint64_t sequence() const { return header_.sequence; }

  // Before its end, as if it had not begun: channels go to the executions behind it, which find
  // there what it has sent and received so far. Requires: no execution that began earlier is under
  // way, and can_drop().
  void drop();
  // Whether no peer reads or writes this memory, which is the execution's, from now on.
  bool can_drop(const std::byte* input, const std::byte* output) const;
  // Whether it counts among ChannelSource::sweeps().
  bool sweeps() const { return bound_.tiles() > 1; }
  // Whether a peer has sent segments of a later operation where this one's are awaited.
  bool is_overtaken() const { return overtaken_; }

  // Once it has ended without kDone, and peers neither read its memory nor write there.
  void forget_memory() { held_.clear(); }

  // After kDisagree: who sent the segment that does not belong here.
  int odd_peer() const { return odd_peer_; }

  // Calls visit(peer) for every peer that a blocked lane waits for, directly: for a segment that is
  // not here, or to take one.
  template <typename Visit>
  void visit_awaited(Visit visit) const;
  // Calls visit(peer) for every peer without which no blocked lane goes on: whose segment is not
  // here, or, where all are, who leaves no room for what is to be sent.
  template <typename Visit>
  void visit_blocking(Visit visit) const;
  // Grows with every row that has run.
  std::uint64_t progress() const;
  // Calls visit(peer) for every peer that is known to be in this operation: a segment of it has
  // come from there, or more have gone there than any channel holds.
  template <typename Visit>
  void visit_heard(Visit visit) const;

 private:
  // A lane of the plan, or a part of it: the rows that lead it, which may be tiles ahead, or those
  // behind them.
  struct Lane {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    bool led = false;  // by the Lane in front of it
    std::uint32_t next = 0;
    std::uint32_t handed_over = 0;  // bit i: send i of the current row is already on its way
    std::uint32_t apart = 0;        // bit i: and is in no room of the channel
    std::uint64_t tile = 0;
  };
  struct Port {
    int peer = 0;
    transport::SendChannel* send = nullptr;
    transport::RecvChannel* recv = nullptr;
    Turn* turn = nullptr;
    std::uint64_t ticket = 0;    // ours when turn->served is it
    std::uint32_t last_row = 0;  // the last one that uses the channel
    bool passed_on = false;      // to the next execution: this one is through with the channel
    bool every_other = false;    // of the channels to its peer: the second, the fourth
    bool lent = false;           // it is but for memory that the channel still reads
  };
  // Of what receivers could fetch, this rank puts so many segments where they belong, if they
  // offer that.
  enum class Own : std::uint8_t { kNothing, kEveryOther, kAll };
  struct Gathered;
  class Walk;

  template <typename Visit>
  void visit_readers(Visit visit) const;
  void make_lanes();
  void find_last_rows();
  void find_sharers();
  static bool is_shared(Collective collective);
  Own own_part(bool in_place) const;
  void find_landings();
  void make_offers() const;
  void hold_memory(const std::byte* input, const std::byte* output);
  bool has_turns(const plan::Row& row) const;
  static void pass_on(Port& port);
  void pass_on_behind(const plan::Row& row, std::uint32_t index);
  void take_back();
  [[nodiscard]] bool settle();
  [[nodiscard]] bool skips(const Port& port, std::uint64_t sequence);
  Progress advance_lane(std::size_t number, int rows);
  bool waits_for_lead(std::size_t number) const;
  Progress run_row(Lane& lane);
  [[nodiscard]] bool segment_of(const BoundRow& bound, std::uint64_t tile, std::uint64_t* offset,
                                std::uint64_t* length) const;
  struct Collected;
  Progress collect(const plan::Row& row, std::size_t bytes, Collected* all);
  static void gather(const BoundRow& bound, const std::byte* const* received, std::size_t skip,
                     Gathered* all);
  [[nodiscard]] bool hand_over(Lane& lane, std::size_t skip, const std::byte* data);
  [[nodiscard]] std::byte* offered(const BoundRow& bound, int i, std::size_t skip) const;
  bool reserve(const BoundRow& bound, std::size_t skip, Gathered* all) const;
  void commit(const plan::Row& row, const Gathered& all) const;
  bool lends(const plan::Row& row, int i, const std::byte* data) const;
  bool is_fetched(const BoundRow& bound, int i, std::size_t skip) const;
  bool intact(const plan::Row& row) const;
  bool repeats(const plan::Row& row, int i, std::uint32_t apart) const;
  bool repeat(const plan::Row& row, transport::SendChannel& channel) const;
  bool bind_part(const plan::Row& row, std::size_t bytes, Gathered* all) const;
  void combine_parts(const plan::Row& row, const Gathered& all, std::uint64_t length) const;
  void combine(const plan::Row& row, const Gathered& all, std::uint64_t length) const;
  void copy(const Gathered& all, std::size_t bytes) const;
  void fold(void* result, const void** operands, int operand_count, std::uint64_t count) const;
  bool spoiled() const;
  bool reads(const std::byte* target, std::size_t bytes) const;

  CollectiveRequest request_;  // of wire elements where it has a wire form
  WireMemory wire_;
  BoundPlan bound_;
  std::vector<Port> ports_;
  std::vector<Lane> lanes_;
  std::vector<transport::shm::Hold> held_;
  const plan::Landings* landings_ = nullptr;  // none where nothing is long enough to be placed
  transport::SegmentHeader header_;
  ChannelSource* channels_ = nullptr;
  Sweep sweep_;
  std::uint32_t scale_divisor_ = 0;  // 0: no scaling
  int odd_peer_ = -1;
  Own own_ = Own::kNothing;
  bool large_ = false;       // all caches have no room for input and output
  bool spread_ = false;      // nor for what a tile reads
  bool streams_ = false;     // copies are written past the caches
  bool lends_ = false;       // some port is lent
  bool only_sends_ = false;  // this rank receives nothing
  bool sends_to_few_ = false;
  bool shares_core_ = false;    // with one of those it sends to
  bool fresh_ = false;          // what rows send on they have reduced, a moment ago
  bool offers_ = false;         // peers may place what is received
  bool is_awaited_ = false;     // who only sends waits to hear whether it may
  bool overtaken_ = false;      // as of the last advance()
  bool long_ = false;           // enough to be lent or placed
  bool has_all_turns_ = false;  // its turn on every channel had come when it began
};

template <typename Visit>
void Execution::visit_awaited(Visit visit) const {
  for (const Lane& lane : lanes_) {
    if (lane.next == lane.end) continue;
    const plan::Row& row = *bound_.rows()[lane.next].row;
    for (int i = 0; i < row.recv_count; ++i) {
      // A peer whose segment is here owes nothing, and may have left in good order.
      const Port& port = ports_[row.recv[i]];
      if (port.recv->peek() == nullptr) visit(port.peer);
    }
    for (int i = 0; i < row.send_count; ++i) visit(ports_[row.send[i]].peer);
  }
  visit_readers(visit);  // all rows may have run, and a peer still read what was lent to it
}

template <typename Visit>
void Execution::visit_blocking(Visit visit) const {
  bool all_done = true;
  for (std::size_t number = 0; number < lanes_.size(); ++number) {
    const Lane& lane = lanes_[number];
    if (lane.next == lane.end) continue;
    all_done = false;
    if (waits_for_lead(number)) continue;
    const plan::Row& row = *bound_.rows()[lane.next].row;
    bool arrived = true;
    for (int i = 0; i < row.recv_count; ++i) {
      const Port& port = ports_[row.recv[i]];
      if (port.recv->peek() != nullptr) continue;
      visit(port.peer);
      arrived = false;
    }
    for (int i = 0; arrived && i < row.send_count; ++i) {
      const Port& port = ports_[row.send[i]];
      if ((lane.handed_over >> i & 1) != 0) continue;
      const bool awaits_answer = only_sends_ && is_awaited_ && !port.send->answered(header_);
      if (awaits_answer || port.send->reserve(0) == nullptr) visit(port.peer);
    }
    if (arrived && (row.flags & plan::kFlagFlush) != 0) visit_readers(visit);
  }
  if (all_done) visit_readers(visit);
}

// Of memory that was handed over or lent.
template <typename Visit>
void Execution::visit_readers(Visit visit) const {
  for (const Port& port : ports_) {
    if (port.send != nullptr && !port.passed_on && !port.send->drained()) visit(port.peer);
  }
}

template <typename Visit>
void Execution::visit_heard(Visit visit) const {
  constexpr std::uint64_t kTilesFar = 64;  // more than the depth of the channels of any medium
  for (const Lane& lane : lanes_) {
    const std::uint32_t end = lane.tile == 0 ? lane.next : lane.end;
    for (std::uint32_t index = lane.begin; index < end; ++index) {
      const plan::Row& row = *bound_.rows()[index].row;
      if (row.chunk == plan::kToken && bound_.tiles() != 1) continue;  // runs in the last tile only
      for (int i = 0; i < row.recv_count; ++i) visit(ports_[row.recv[i]].peer);
      for (int i = 0; lane.tile > kTilesFar && i < row.send_count; ++i) {
        visit(ports_[row.send[i]].peer);
      }
    }
  }
}

}  // namespace pycoll::runtime
