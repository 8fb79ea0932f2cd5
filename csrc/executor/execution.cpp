#include "executor/execution.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"

namespace pycoll::executor {

// The segments that have arrived for a row.
struct Execution::Arrived {
  const std::byte* received[plan::kRecvMax];
  bool exposed = false;           // a sender may withdraw it during the read (ZeroCopyReceiver)
  bool written_directly = false;  // the sender has written the row's only segment into the target
};

Status Execution::start(CollectiveRequest request, std::uint64_t sequence,
                        ChannelSource& channels) {
  const std::byte* input = request.input.data;
  std::byte* output = request.output.data;
  Status status = bind(std::move(request), channels);
  if (status.ok()) begin(sequence, input, output);
  return status;
}

Status Execution::bind(CollectiveRequest request, ChannelSource& channels) {
  request_ = std::move(request);
  Status status = wire_.bind(&request_);
  if (status.ok()) status = bound_.bind(request_);
  if (!status.ok()) return status;
  header_.agreement = hash_bytes(&request_.descriptor, sizeof(request_.descriptor));
  channels_ = &channels;
  is_long_ = bound_.longest_bytes() >= transport::kUncopiedBytesMin;
  opens_windows_ = is_long_ && request_.parts.empty();
  ports_.bind(request_.plan->plan(), channels);
  lanes_.bind(*request_.plan, bound_, request_.segment_bytes);
  sender_.bind(request_, bound_, ports_, is_long_);
  combiner_.bind(request_, bound_.item_bytes(), channels.uncached_bytes());
  code_combiner_.bind(request_);
  return Status();
}

void Execution::begin(std::uint64_t sequence, const std::byte* input, std::byte* output) {
  if (wire_.is_used()) wire_.begin(&input, &output);
  bound_.move_to(input, output);
  combiner_.begin(input == output);
  header_.sequence = sequence;
  ports_.begin();
  lanes_.begin(traversals() && channels_->traversals()++ % 2 != 0);
  if (!is_long_) return;
  hold_memory(input, output);
  open_windows();
}

// Pins the arena memory that peers may read or write before this operation has ended.
void Execution::hold_memory(const std::byte* input, const std::byte* output) {
  held_.clear();
  const auto hold = [this](const std::byte* from, const std::byte* to) {
    held_.emplace_back(from);
    if (to != from) held_.emplace_back(to);
  };
  if (request_.parts.empty()) return hold(input, output);
  for (const Part& part : request_.parts) hold(part.input, part.output);
}

// Opens the write windows. Where the plan announces windows, senders wait for the announcement.
// This rank then announces a window of 0 uses if it opens none.
void Execution::open_windows() const {
  const plan::DirectWrites& direct_writes = request_.plan->direct_writes();
  for (std::size_t i = 0; i < direct_writes.window_uses.size(); ++i) {
    transport::WriteWindows* windows = ports_.abilities(i).recv.windows;
    const std::uint64_t uses = opens_windows_ ? direct_writes.window_uses[i] : 0;
    if (windows == nullptr || (uses == 0 && !direct_writes.announced[i])) continue;
    windows->open_window(
        {header_.sequence, header_.agreement, uses, bound_.output(), request_.output.bytes});
  }
}

Progress Execution::advance() {
  if (wire_.is_used() && !wire_.enter_some()) return Progress::kMoved;
  ports_.take_back();
  overtaken_ = false;
  // Lanes alternate row by row: a segment that one lane sends is
  // often what another lane of the peer waits for.
  const int rows = lanes_.size() == 1 ? kRowsPerAdvance : 1;
  bool moved = false;
  bool all_done = false;
  bool moves = true;
  for (int run = 0; moves && run < kRowsPerAdvance; run += rows) {
    moves = false;
    all_done = true;
    for (std::size_t number = 0; number < lanes_.size(); ++number) {
      if (lanes_[number].has_ended()) continue;
      const Progress progress = advance_lane(number, rows);
      if (progress == Progress::kDisagree || progress == Progress::kSpoiled) return progress;
      moves |= progress != Progress::kBlocked;
      all_done &= progress == Progress::kDone;
    }
    moved |= moves;
  }
  if (!all_done) return moved ? Progress::kMoved : Progress::kBlocked;
  // Memory that peers still read belongs to the caller again only when they have read it.
  if (!ports_.pass_on_rest()) return Progress::kBlocked;
  held_.clear();
  if (wire_.is_used() && !wire_.leave_some()) return Progress::kMoved;
  return Progress::kDone;
}

// Runs at most `rows` rows of one lane, until it blocks or ends.
Progress Execution::advance_lane(std::size_t number, int rows) {
  Lane& lane = lanes_[number];
  for (int run = 0; run < rows; ++run) {
    const Progress progress = lanes_.may_run(number) ? run_row(lane) : Progress::kBlocked;
    if (progress == Progress::kBlocked) return run > 0 ? Progress::kMoved : Progress::kBlocked;
    if (progress != Progress::kMoved) return progress;
    if (lanes_.is_in_last_tile(lane)) {
      ports_.pass_on_behind(*bound_.rows()[lane.next].row, lane.next);
    }
    if (!lanes_.step(lane)) return Progress::kDone;
  }
  return Progress::kMoved;
}

// Runs the lane's next row in its tile: kMoved if the row has run, or has no work in the tile.
Progress Execution::run_row(Lane& lane) {
  const BoundRow& bound = bound_.rows()[lane.next];
  const plan::Row& row = *bound.row;
  Range segment{};
  if (!lanes_.segment_of(bound, lane.tile, &segment)) return Progress::kMoved;
  if (!ports_.owns(row)) return Progress::kBlocked;
  const std::size_t bytes = segment.length * bound_.item_bytes();
  header_.bytes = static_cast<std::uint32_t>(bytes);

  const bool coded = plan::is_coded(row);
  Arrived arrived;
  const Progress ready =
      take(row, bytes, coded ? code_combiner_.code_bytes(segment.length) : 0, &arrived);
  if (ready != Progress::kMoved) return ready;
  const Outgoing out{bound, header_, segment.offset * bound_.item_bytes()};
  Gathered all;
  all.collect(bound, arrived.received, out.skip);
  if (arrived.written_directly) all.operands[0] = all.target;
  if (all.target != nullptr && (row.flags & plan::kFlagFlush) != 0 && is_read(all.target, bytes)) {
    return Progress::kBlocked;
  }
  const Progress sent = coded ? send_coded_row(out, segment, arrived.exposed, &all)
                              : send_row(out, segment.length, arrived.exposed, &lane, &all);
  if (sent != Progress::kMoved) return sent;
  for (int i = 0; i < row.recv_count; ++i) ports_[row.recv[i]].recv->release();
  return Progress::kMoved;
}

// Finds the segment at the head of every receive channel. kMoved if all segments have arrived and
// belong to this operation. `bytes` and `code_bytes`: of a segment of values, and of codes.
Progress Execution::take(const plan::Row& row, std::size_t bytes, std::size_t code_bytes,
                         Arrived* all) {
  for (int i = 0; i < row.recv_count; ++i) {
    const Port& port = ports_[row.recv[i]];
    const transport::Segment* segment = port.recv->peek();
    if (segment == nullptr) return Progress::kBlocked;
    const transport::SegmentHeader& header = segment->header;
    if (header.sequence != header_.sequence && skips(port, header.sequence)) {
      --i;
      continue;
    }
    if (header.sequence > header_.sequence) {
      overtaken_ = true;
      return Progress::kBlocked;
    }
    if (header.sequence != header_.sequence || header.agreement != header_.agreement ||
        header.bytes != ((row.coded_recv >> i & 1) != 0 ? code_bytes : bytes) ||
        (segment->written_directly &&
         !(opens_windows_ && (row.flags & plan::kFlagDirectWrite) != 0))) {
      return Progress::kDisagree;
    }
    all->received[i] = segment->data;
    all->exposed |= segment->exposed;
    all->written_directly |= segment->written_directly;
  }
  return Progress::kMoved;
}

// Releases the segment at the head of the channel if its operation was dropped.
bool Execution::skips(const Port& port, std::uint64_t sequence) const {
  if (!channels_->is_dropped(sequence)) return false;
  port.recv->release();
  return true;
}

// Whether a peer may still read memory of the row's target that this operation handed over.
bool Execution::is_read(const std::byte* target, std::size_t bytes) const {
  // With several arrays, `target` is a virtual address (rows/combiner.h).
  return request_.parts.empty() ? ports_.reads(target, bytes) : ports_.reads_any();
}

// Combines and sends. `exposed`: the peers may withdraw the memory that the row reads.
Progress Execution::send_row(const Outgoing& out, std::uint64_t length, bool exposed, Lane* lane,
                             Gathered* all) const {
  const plan::Row& row = *out.bound.row;
  // The caller's memory does not change before it is sent; a scratch slot is reused.
  const bool direct = in_memory(row.source) && row.recv_count == 0 && row.send_count > 0 &&
                      combiner_.find_contiguous(row, out.header.bytes, all);
  const bool has_space = direct ? sender_.hand_over(out, *all, lane) : sender_.reserve(out, all);
  if (!has_space) return Progress::kBlocked;
  if (length != 0 && (all->target != nullptr || all->slot_buffer_count != 0)) {
    combiner_.run(row, *all, length);
  }
  if (combiner_.is_spoiled()) return Progress::kSpoiled;
  // A failing peer has withdrawn the memory that the row read, so the result is not used. The
  // peer's notice reports the failure.
  if (exposed && !intact(row)) return Progress::kBlocked;
  if (!direct) sender_.commit(out, *all);
  return Progress::kMoved;
}

// The same for a row with codes.
Progress Execution::send_coded_row(const Outgoing& out, Range segment, bool exposed,
                                   Gathered* all) const {
  const plan::Row& row = *out.bound.row;
  const std::size_t code_bytes = code_combiner_.code_bytes(segment.length);
  if (!sender_.reserve_coded(row, out.header.bytes, code_bytes, all)) return Progress::kBlocked;
  code_combiner_.run(out.bound, segment, *all, combiner_.streams());
  if (exposed && !intact(row)) return Progress::kBlocked;
  sender_.commit_coded(row, out.header, code_bytes);
  return Progress::kMoved;
}

// Whether no peer has withdrawn the memory that the row has just read.
bool Execution::intact(const plan::Row& row) const {
  return std::all_of(row.recv, row.recv + row.recv_count, [this](std::uint16_t index) {
    transport::ZeroCopyReceiver* zero_copy = ports_.abilities(index).recv.zero_copy;
    return zero_copy == nullptr || zero_copy->intact();
  });
}

void Execution::drop() {
  ports_.drop();
  if (traversals()) --channels_->traversals();
  held_.clear();
}

// Holds know whether peers read or write arena memory in place. Channels know it of other memory.
bool Execution::can_drop(const std::byte* input, const std::byte* output) const {
  if (std::any_of(held_.begin(), held_.end(), [](const auto& one) { return one.holds(); })) {
    return false;
  }
  const auto reads = [this](const std::byte* data, std::size_t bytes) {
    return bytes != 0 && ports_.reads(data, bytes);
  };
  if (request_.parts.empty()) {
    return !reads(input, request_.input.bytes) && !reads(output, request_.output.bytes);
  }
  std::uint64_t begin = 0;
  return std::none_of(request_.parts.begin(), request_.parts.end(), [&](const Part& part) {
    const std::uint64_t bytes = part.end - std::exchange(begin, part.end);
    return reads(part.input, bytes) || reads(part.output, bytes);
  });
}

}  // namespace pycoll::executor
