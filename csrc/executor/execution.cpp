#include "executor/execution.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/cache.h"
#include "base/copy.h"
#include "executor/execution_row.h"

namespace pycoll::executor {
namespace {

// Rows combine in pieces of this many bytes. So a result is still in L1 when it is combined with
// further operands and copied to further destinations.
constexpr std::size_t kPieceBytes = 8 * 1024;

// Whether no row reads what another row has copied into the output.
bool leaves_output(const plan::Plan& plan) {
  return std::none_of(plan.rows.begin(), plan.rows.end(), [](const plan::Row& row) {
    return static_cast<plan::Buffer>(row.source) == plan::Buffer::kOutput;
  });
}

bool combines(const plan::Plan& plan) {
  return std::any_of(plan.rows.begin(), plan.rows.end(),
                     [](const plan::Row& row) { return plan::operand_count(row) > 1; });
}

// Bytes that all rows of one tile read, with segments of `segment_bytes`.
std::size_t bytes_read(const plan::Plan& plan, std::size_t segment_bytes) {
  std::size_t segments = 0;
  for (const plan::Row& row : plan.rows) {
    if (row.chunk != plan::kToken) segments += plan::operand_count(row);
  }
  return segments * segment_bytes;
}

}  // namespace

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
  const plan::Plan& plan = request_.plan->plan();
  bind_codec();
  header_.agreement = hash_bytes(&request_.descriptor, sizeof(request_.descriptor));
  combines_ = combines(plan);
  const std::size_t moved = request_.input.bytes + request_.output.bytes;
  large_ = moved >= channels.uncached_bytes() && leaves_output(plan);
  tile_exceeds_cache_ =
      large_ && bytes_read(plan, request_.segment_bytes) > core_cache_bytes() / 4 * 3;
  scale_divisor_ = request_.scale != nullptr ? request_.plan->contributors() : 0;
  channels_ = &channels;

  ports_.clear();
  abilities_.clear();
  for (const plan::Channel& channel : plan.channels) add_port(channel, channels);
  find_last_rows();
  find_alternate_ports();
  find_direct_writes();
  make_lanes();
  return Status();
}

void Execution::add_port(const plan::Channel& channel, ChannelSource& channels) {
  Port& port = ports_.emplace_back();
  Abilities& can = abilities_.emplace_back();
  port.peer = static_cast<int>(channel.peer);
  if (static_cast<plan::Direction>(channel.direction) == plan::Direction::kSend) {
    port.send = &channels.send_channel(port.peer, channel.number);
    port.ticket_lock = &channels.send_ticket(port.peer, channel.number);
    can.send = port.send->capabilities();
    port.sources = can.send.sources;
    if (can.send.multicast != nullptr) can.memory = can.send.multicast->memory();
  } else {
    port.recv = &channels.recv_channel(port.peer, channel.number);
    port.ticket_lock = &channels.recv_ticket(port.peer, channel.number);
    can.recv = port.recv->capabilities();
  }
}

void Execution::begin(std::uint64_t sequence, const std::byte* input, std::byte* output) {
  if (wire_.is_used()) wire_.begin(&input, &output);
  bound_.move_to(input, output);
  // Data that is reduced in place was read a moment ago and is in a cache, so copies go through the
  // caches. With many ranks a tile reads so much in between that the data is evicted again.
  streams_ = large_ && (input != output || !combines_ || tile_exceeds_cache_);
  header_.sequence = sequence;
  traversal_.backwards = traversals() && channels_->traversals()++ % 2 != 0;
  odd_peer_ = -1;
  has_all_tickets_ = true;
  for (Port& port : ports_) {
    port.ticket = port.ticket_lock->issued++;
    port.passed_on = port.exposed = false;
    has_all_tickets_ &= port.ticket_lock->served == port.ticket;
  }
  exposes_ = false;
  for (Lane& lane : lanes_) {
    lane.next = lane.begin;
    lane.handed_over = lane.apart = 0;
    lane.tile = 0;
  }
  if (long_) hold_memory(input, output);
  if (long_) open_windows();
}

// The segment of the row's chunk in this tile, in
// elements; false if the row has no work in this tile.
bool Execution::segment_of(const BoundRow& bound, std::uint64_t tile, std::uint64_t* offset,
                           std::uint64_t* length) const {
  if (bound.row->chunk == plan::kToken) {
    *offset = *length = 0;
    return tile + 1 == bound_.tiles();
  }
  const std::uint64_t segment = bound_.segment_length();
  *offset = tile * segment;
  if (*offset >= bound.length) {
    *offset = *length = 0;
    return tile == 0;  // an empty segment travels, so that ranks compare their operations
  }
  if (traversal_.backwards)
    *offset = traversal_.segment(tile, div_ceil(bound.length, segment)) * segment;
  *length = std::min(segment, bound.length - *offset);
  return true;
}

// Finds the segment at the head of every receive channel. kMoved if all segments have arrived and
// belong to this operation. `bytes` and `code_bytes`: of a segment of values, and of codes.
Progress Execution::collect(const plan::Row& row, std::size_t bytes, std::size_t code_bytes,
                            Collected* all) {
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
      odd_peer_ = port.peer;
      return Progress::kDisagree;
    }
    all->received[i] = segment->data;
    all->exposed |= segment->exposed;
    all->written_directly |= segment->written_directly;
  }
  return Progress::kMoved;
}

// Releases the segment at the head of the channel if its operation was dropped.
bool Execution::skips(const Port& port, std::uint64_t sequence) {
  if (!channels_->is_dropped(sequence)) return false;
  port.recv->release();
  return true;
}

// Whether a peer may still read memory of the row's target that this operation handed over.
bool Execution::reads(const std::byte* target, std::size_t bytes) const {
  // With several arrays, `target` is a virtual offset and not an address (execution_parts.cpp).
  const bool whole = !request_.parts.empty();
  return std::any_of(ports_.begin(), ports_.end(), [&](const Port& port) {
    if (port.send == nullptr || port.passed_on) return false;
    return whole ? port.reads_any() : port.reads(target, bytes);
  });
}

// Whether all that the row has just read is unchanged since its peers sent it.
bool Execution::intact(const plan::Row& row) const {
  return std::all_of(row.recv, row.recv + row.recv_count, [this](std::uint16_t index) {
    transport::ZeroCopyReceiver* zero_copy = abilities_[index].recv.zero_copy;
    return zero_copy == nullptr || zero_copy->intact();
  });
}

// Collects the row's operands in their order, and the local address of the result.
void Execution::gather(const BoundRow& bound, const std::byte* const* received, std::size_t skip,
                       Gathered* all) {
  // A scratch slot is one segment and starts at zero in every tile; input and output advance.
  const auto at = [skip](std::byte* base, std::uint8_t buffer) {
    return static_cast<plan::Buffer>(buffer) == plan::Buffer::kScratch ? base : base + skip;
  };
  const plan::Row& row = *bound.row;
  const bool local = static_cast<plan::Buffer>(row.source) != plan::Buffer::kNone;
  if (row.carry != 0) all->operands[all->operand_count++] = bound.carry;
  for (int i = 0; i <= row.recv_count; ++i) {
    if (local && i == row.source_position) {
      all->local = all->operand_count;
      all->operands[all->operand_count++] = at(bound.source, row.source);
    }
    if (i < row.recv_count) all->operands[all->operand_count++] = received[i];
  }
  if (static_cast<plan::Buffer>(row.target) != plan::Buffer::kNone) {
    all->target = at(bound.target, row.target);
  }
}

Progress Execution::run_row(Lane& lane) {
  const BoundRow& bound = bound_.rows()[lane.next];
  const plan::Row& row = *bound.row;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  if (!segment_of(bound, lane.tile, &offset, &length)) return Progress::kMoved;
  if (!has_tickets(row)) return Progress::kBlocked;
  const std::size_t bytes = length * bound_.item_bytes();
  header_.bytes = static_cast<std::uint32_t>(bytes);

  Collected arrived;
  const Progress ready = collect(row, bytes, code_bytes(row, length), &arrived);
  if (ready != Progress::kMoved) return ready;
  const std::size_t skip = offset * bound_.item_bytes();
  Gathered all;
  gather(bound, arrived.received, skip, &all);
  if (arrived.written_directly) all.operands[0] = all.target;
  if (all.target != nullptr && (row.flags & plan::kFlagFlush) != 0 && reads(all.target, bytes)) {
    return Progress::kBlocked;
  }
  if (plan::is_coded(row)) return run_coded_row(bound, offset, length, arrived, all);
  // The caller's memory does not change before it is sent; a scratch slot is reused.
  const auto source = static_cast<plan::Buffer>(row.source);
  const bool stable = source != plan::Buffer::kNone && source != plan::Buffer::kScratch;
  const bool direct =
      stable && row.recv_count == 0 && row.send_count > 0 && bind_part(row, bytes, &all);
  const bool has_space = direct ? hand_over(lane, skip, all) : reserve(bound, skip, &all);
  if (!has_space) return Progress::kBlocked;
  if (length != 0 && (all.target != nullptr || all.slot_buffer_count != 0)) {
    request_.parts.empty() ? combine(row, all, length) : combine_parts(row, all, length);
  }
  if (is_spoiled()) return Progress::kSpoiled;
  if (streams_) stream_fence();
  // A failing peer has withdrawn the memory that the row read, so the result is not used. The
  // peer's failure will be reported by its notice.
  if (arrived.exposed && !intact(row)) return Progress::kBlocked;
  if (!direct) commit(row, all);
  for (int i = 0; i < row.recv_count; ++i) ports_[row.recv[i]].recv->release();
  return Progress::kMoved;
}

bool Execution::is_spoiled() const {
  return request_.reduction_failed != nullptr &&
         request_.reduction_failed->load(std::memory_order_relaxed);
}

// Folds from the left, with as many operands per call as a kernel takes. `result` may be one of the
// operands, so only the last call writes to it.
void Execution::fold(void* result, const void** operands, int operand_count,
                     std::uint64_t count) const {
  const kernels::Combine& combine = request_.combine;
  alignas(64) std::byte partial[kPieceBytes];
  while (operand_count > kernels::kSourcesMax) {
    combine.function(partial, operands, kernels::kSourcesMax, count, combine.context);
    operands += kernels::kSourcesMax - 1;
    operand_count -= kernels::kSourcesMax - 1;
    operands[0] = partial;
  }
  combine.function(result, operands, operand_count, count, combine.context);
}

void Execution::copy(const Gathered& all, std::size_t bytes) const {
  const std::byte* from = all.operands[0];
  // In place, the target holds the data already.
  if (all.target != nullptr && all.target != from) {
    streams_ ? stream_copy(all.target, from, bytes) : copy_bytes(all.target, from, bytes);
  }
  for (int i = 0; i < all.slot_buffer_count; ++i) all.slot_buffers[i].fill(0, from, bytes);
}

void Execution::combine(const plan::Row& row, const Gathered& all, std::uint64_t length) const {
  const std::size_t item = bound_.item_bytes();
  if (all.operand_count == 1) return copy(all, length * item);
  if (all.operand_count == 0) return;
  const bool scaled = scale_divisor_ != 0 && (row.flags & plan::kFlagFinal) != 0;
  // The result is computed in a slot buffer or in the target where stores are fast, else in a
  // temporary buffer and then copied.
  const bool into_slot_buffer = all.target == nullptr && all.slot_buffers[0].suits_results();
  const bool into_target =
      all.target != nullptr &&
      std::none_of(all.operands, all.operands + all.operand_count,
                   [&](const std::byte* operand) { return aliases_4k(all.target, operand); });
  alignas(64) std::byte made[kPieceBytes];
  const std::uint64_t piece = kPieceBytes / item;
  if (into_target && all.slot_buffer_count == 0 && !scaled && length <= piece) {
    // The usual last row of a short operation.
    const void* operands[plan::kOperandsMax];
    std::copy(all.operands, all.operands + all.operand_count, operands);
    return fold(all.target, operands, all.operand_count, length);
  }
  for (std::uint64_t done = 0; done < length; done += piece) {
    const std::uint64_t count = std::min(piece, length - done);
    const std::size_t skip = done * item;
    const void* operands[plan::kOperandsMax];
    for (int i = 0; i < all.operand_count; ++i) operands[i] = all.operands[i] + skip;
    std::byte* result = into_target        ? all.target + skip
                        : into_slot_buffer ? all.slot_buffers[0].data + skip
                                           : made;
    fold(result, operands, all.operand_count, count);
    if (scaled) request_.scale(result, count, scale_divisor_);
    if (all.target != nullptr && !into_target) copy_bytes(all.target + skip, result, count * item);
    for (int i = into_slot_buffer ? 1 : 0; i < all.slot_buffer_count; ++i) {
      all.slot_buffers[i].fill(skip, result, count * item);
    }
  }
}

}  // namespace pycoll::executor
