// The host executor: runs one bound plan in small steps. It never blocks, allocates or starts a
// thread. advance() does what can be done now and returns. So the same code serves a blocking call,
// a progress thread and a simulator that steps many ranks in one thread.
//
//   for each tile, for each row:
//     wait for segments and slot buffers -> combine -> fill target and slot buffers -> release
//
// Each lane runs through its own rows and tiles, independently of the other lanes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "executor/bound_plan.h"
#include "executor/request.h"
#include "executor/traversal.h"
#include "executor/wire_memory.h"
#include "plan/direct_writes.h"
#include "shared_memory/shm_arena.h"
#include "transport/capabilities.h"

namespace pycoll::executor {

// A ticket lock for one end of a channel. Executions own the end one after the other, in the order
// in which they began. Both counts only grow.
struct ChannelTicket {
  std::uint64_t issued = 0;  // executions that have begun
  std::uint64_t served = 0;  // executions that no longer use the channel
};

// Finds the channels of a plan and their ticket locks. The engine implements it over its links.
class ChannelSource {
 public:
  virtual ~ChannelSource() = default;
  virtual transport::SendChannel& send_channel(int peer, std::uint32_t number) = 0;
  virtual transport::RecvChannel& recv_channel(int peer, std::uint32_t number) = 0;
  // The ticket locks outlive every execution that was bound to them.
  virtual ChannelTicket& send_ticket(int peer, std::uint32_t number) = 0;
  virtual ChannelTicket& recv_ticket(int peer, std::uint32_t number) = 0;
  // Number of begun executions for which Execution::traversals() is true. begin() increments
  // it, drop() decrements it. The number is the same on all ranks for the same execution, because
  // all ranks begin these executions in the same order.
  virtual std::uint64_t& traversals() = 0;
  // The bytes of memory from which copies bypass the caches (base/cache.h).
  virtual std::size_t uncached_bytes() const = 0;
  // Whether this operation has ended on all ranks because one of them refused it. Its segments that
  // remain in channels are then discarded.
  virtual bool is_dropped(std::uint64_t sequence) const = 0;
};

enum class Progress : std::uint8_t {
  kBlocked,   // nothing moved
  kMoved,     // something moved, more remains
  kDone,      // every row of every tile has run
  kDisagree,  // a segment of another operation arrived; odd_peer() sent it
  kSpoiled,   // the user's reduction failed; its result was not sent
};

// One thread at a time. Reusable: start() begins anew and keeps capacity.
//
// Several executions may be in progress over the same channels. Each channel serves them in the
// order of their begin(), so an earlier execution finds the channels as if it were alone. The
// caller of begin() checks that the memory of these executions allows that.
class Execution {
 public:
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
  std::uint64_t sequence() const { return header_.sequence; }

  // Cancels an execution before its end, as if it had not begun. The executions behind it get its
  // channels, which still hold the segments that it has sent or has yet to receive. Requires: no
  // execution that began earlier is in progress, and can_drop().
  void drop();
  // Whether no peer reads or writes this execution's memory from
  // now on. `input` and `output` are that memory.
  bool can_drop(const std::byte* input, const std::byte* output) const;
  // Whether this execution counts in ChannelSource::traversals(): it has several tiles, and its
  // plan alternates.
  bool traversals() const { return bound_.tiles() > 1 && request_.plan->alternates(); }
  // Whether a peer has sent segments of a later operation where a segment of this one is expected.
  bool is_overtaken() const { return overtaken_; }

  // Releases the arena memory. Call it when the execution has ended without kDone and peers neither
  // read nor write its memory.
  void forget_memory() { held_.clear(); }

  // After kDisagree: the rank that sent the segment of another operation.
  int odd_peer() const { return odd_peer_; }

  // Calls visit(peer) for every peer that a blocked lane waits for directly: to send a segment that
  // has not arrived, or to take one.
  template <typename Visit>
  void visit_waits(Visit visit) const;
  // Calls visit(peer) for every peer that blocks a lane: its segment is missing or, where all
  // segments have arrived, its channel is full or its answer about a write window is missing. Peers
  // that still read memory count where a flush, or the end of all lanes, waits for them.
  template <typename Visit>
  void visit_blocking(Visit visit) const;
  // Grows with every row that has run.
  std::uint64_t progress() const;
  // Calls visit(peer) for every peer that is known to have entered this operation: a segment of the
  // operation has come from it, or more segments have gone to it than any channel holds.
  template <typename Visit>
  void visit_heard(Visit visit) const;

 private:
  // A lane of the plan, or one of its two halves: the leading rows, which may run tiles ahead
  // (FORMAT.md, Leading rows), or the rows behind them.
  struct Lane {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    bool follows_leading = false;  // the Lane in front of it holds its leading rows
    std::uint64_t ahead = 0;       // of leading rows: see tiles_ahead()
    std::uint32_t next = 0;
    std::uint32_t handed_over = 0;  // bit i: send i of the current row is already sent
    // Bit i: send i was exposed or written directly, so it has no slot buffer.
    std::uint32_t apart = 0;
    std::uint64_t tile = 0;
  };
  struct Port {
    int peer = 0;
    transport::SendChannel* send = nullptr;
    transport::RecvChannel* recv = nullptr;
    ChannelTicket* ticket_lock = nullptr;
    std::uint64_t ticket = 0;  // this execution owns the channel when ticket_lock->served == ticket
    std::uint32_t last_row = 0;  // the last row that uses the channel
    bool passed_on = false;      // this execution no longer uses the channel
    bool alternate = false;      // this is the second, fourth ... data channel to its peer
    bool exposed = false;        // last_row has run, but the channel still reads memory
    transport::SourceRecord* sources = nullptr;

    // Whether the channel may still read handed-over memory, or this part of it.
    bool reads_any() const { return sources != nullptr ? !sources->flushed() : !send->drained(); }
    bool reads(const std::byte* data, std::size_t bytes) const {
      return sources != nullptr ? sources->reads(data, bytes) : !send->drained();
    }
  };
  // The optional abilities of a port's channel. Apart from the ports, so that short operations find
  // all ports in few cache lines.
  struct Abilities {
    transport::SendCapabilities send;
    transport::RecvCapabilities recv;
    const void* memory = nullptr;  // Multicast::memory(); nullptr: each peer gets its own copy
  };
  struct Gathered;
  class Walk;

  template <typename Visit>
  void visit_readers(Visit visit) const;
  void add_port(const plan::Channel& channel, ChannelSource& channels);
  void make_lanes();
  void find_last_rows();
  void find_alternate_ports();
  void find_direct_writes();
  void open_windows() const;
  void hold_memory(const std::byte* input, const std::byte* output);
  bool has_tickets(const plan::Row& row) const;
  static void pass_on(Port& port);
  void pass_on_behind(const plan::Row& row, std::uint32_t index);
  void take_back();
  [[nodiscard]] bool pass_on_rest();
  [[nodiscard]] bool skips(const Port& port, std::uint64_t sequence);
  Progress advance_lane(std::size_t number, int rows);
  bool waits_for_leading(std::size_t number) const;
  bool is_far_ahead(std::size_t number) const;
  std::uint64_t tiles_ahead(std::span<const plan::Row> leading) const;
  Progress run_row(Lane& lane);
  [[nodiscard]] bool segment_of(const BoundRow& bound, std::uint64_t tile, std::uint64_t* offset,
                                std::uint64_t* length) const;
  struct Collected;
  Progress collect(const plan::Row& row, std::size_t bytes, std::size_t code_bytes, Collected* all);
  static void gather(const BoundRow& bound, const std::byte* const* received, std::size_t skip,
                     Gathered* all);
  [[nodiscard]] bool hand_over(Lane& lane, std::size_t skip, const Gathered& gathered);
  [[nodiscard]] std::byte* find_window(const BoundRow& bound, int i, std::size_t skip) const;
  bool awaits_answer(const plan::Row& row, int i) const;
  bool reserve(const BoundRow& bound, std::size_t skip, Gathered* all) const;
  void commit(const plan::Row& row, const Gathered& all) const;
  bool exposes(const plan::Row& row, int i, const std::byte* data) const;
  bool is_fetched(const BoundRow& bound, int i, std::size_t skip, const Gathered& gathered) const;
  bool intact(const plan::Row& row) const;
  bool repeats(const plan::Row& row, int i, std::uint32_t apart) const;
  bool repeat(const plan::Row& row, int i) const;
  bool bind_part(const plan::Row& row, std::size_t bytes, Gathered* all) const;
  void combine_parts(const plan::Row& row, const Gathered& all, std::uint64_t length) const;
  void combine(const plan::Row& row, const Gathered& all, std::uint64_t length) const;
  void copy(const Gathered& all, std::size_t bytes) const;
  void fold(void* result, const void** operands, int operand_count, std::uint64_t count) const;
  struct CodedPiece;
  void bind_codec();
  std::size_t code_bytes(const plan::Row& row, std::uint64_t length) const;
  Progress run_coded_row(const BoundRow& bound, std::uint64_t offset, std::uint64_t length,
                         const Collected& arrived, const Gathered& all);
  void run_coded_piece(const BoundRow& bound, std::uint64_t offset, const Gathered& all,
                       std::byte* const* slots, CodedPiece piece);
  const float* fold_codes(const plan::Row& row, const Gathered& all, const CodedPiece& piece,
                          float* made) const;
  void encode_piece(const BoundRow& bound, std::uint64_t offset, const CodedPiece& piece,
                    float* made, std::byte* codes);
  void hand_out(const plan::Row& row, const Gathered& all, std::byte* const* slots,
                const CodedPiece& piece) const;
  bool is_spoiled() const;
  bool reads(const std::byte* target, std::size_t bytes) const;

  CollectiveRequest request_;  // counts wire elements if it has a wire form
  WireMemory wire_;
  BoundPlan bound_;
  std::vector<Port> ports_;
  std::vector<Abilities> abilities_;  // by port
  std::vector<Lane> lanes_;
  std::vector<transport::shm::Hold> held_;
  // nullptr if no segment is long enough for a direct write.
  const plan::DirectWrites* direct_writes_ = nullptr;
  kernels::Codec codec_;  // of the plan's codes; its seed is this rank's own
  kernels::CodecKernels codec_kernels_;
  transport::SegmentHeader header_;
  ChannelSource* channels_ = nullptr;
  Traversal traversal_;
  std::uint32_t scale_divisor_ = 0;  // 0: no scaling
  int odd_peer_ = -1;
  bool large_ = false;               // input and output do not fit in the caches
  bool tile_exceeds_cache_ = false;  // the rows of one tile read most of a core's cache or more
  bool streams_ = false;             // copies use non-temporal stores
  bool exposes_ = false;             // some port is exposed
  bool combines_ = false;            // some row has several operands
  bool opens_windows_ = false;       // peers may write directly into the output
  bool overtaken_ = false;           // as of the last advance()
  bool long_ = false;                // segments are long enough to be exposed or written directly
  bool has_all_tickets_ = false;     // it owned every channel when it began
};

template <typename Visit>
void Execution::visit_waits(Visit visit) const {
  for (const Lane& lane : lanes_) {
    if (lane.next == lane.end) continue;
    const plan::Row& row = *bound_.rows()[lane.next].row;
    for (int i = 0; i < row.recv_count; ++i) {
      // A peer whose segment has arrived owes nothing, and may have closed in good order.
      const Port& port = ports_[row.recv[i]];
      if (port.recv->peek() == nullptr) visit(port.peer);
    }
    for (int i = 0; i < row.send_count; ++i) visit(ports_[row.send[i]].peer);
  }
  visit_readers(visit);  // all rows may have run while a peer still reads exposed memory
}

template <typename Visit>
void Execution::visit_blocking(Visit visit) const {
  bool all_done = true;
  for (std::size_t number = 0; number < lanes_.size(); ++number) {
    const Lane& lane = lanes_[number];
    if (lane.next == lane.end) continue;
    all_done = false;
    if (waits_for_leading(number)) continue;
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
      if (awaits_answer(row, i) || port.send->reserve(0) == nullptr) visit(port.peer);
    }
    if (arrived && (row.flags & plan::kFlagFlush) != 0) visit_readers(visit);
  }
  if (all_done) visit_readers(visit);
}

// Visits the peers that still read memory which was handed over or exposed.
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

}  // namespace pycoll::executor
