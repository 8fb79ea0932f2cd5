#include "runtime/execution.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/cache.h"
#include "base/copy.h"
#include "plan/layout.h"
#include "runtime/execution_row.h"

namespace pycoll::runtime {
namespace {

// Combined in pieces of this many bytes, so that a result is still in L1 when it is combined with
// further operands and copied to further destinations.
constexpr std::size_t kPieceBytes = 8 * 1024;

// Memory of this many bytes on each rank is read again from elsewhere, whether it was written
// through the caches or past them: so many of a core's own ones, and more than the ranks have room
// for in what cores share. Past the caches, broadcast and all_gather of 8 to 32 MiB took 0.55 to
// 0.9 of their time, all_gather of 4 MiB a tenth more (Zen 4, 1 and 32 MiB of cache); where 2 ranks
// have 480 MiB, 16 and 32 MiB took 1.07 to 1.15 of it, 128 MiB 0.75.
std::size_t uncached_bytes(std::size_t ranks) {
  constexpr std::size_t kCoreCaches = 8, kSharedPart = 3;
  return std::max(kCoreCaches * core_cache_bytes(), shared_cache_bytes() / kSharedPart / ranks);
}

// Whether no row reads what another one has copied.
bool leaves_output(const plan::Plan& plan) {
  return std::none_of(plan.rows.begin(), plan.rows.end(), [](const plan::Row& row) {
    return static_cast<plan::Buffer>(row.source) == plan::Buffer::kOutput;
  });
}

// What all rows of a tile read, in segments of so many bytes.
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
  header_.agreement = hash_bytes(&request_.descriptor, sizeof(request_.descriptor));
  fresh_ = plan::reduces(static_cast<Collective>(plan.header->collective));
  const std::size_t moved = request_.input.bytes + request_.output.bytes;
  large_ = moved >= uncached_bytes(plan.header->size) && leaves_output(plan);
  spread_ = large_ && bytes_read(plan, request_.segment_bytes) > core_cache_bytes() / 4 * 3;
  scale_divisor_ = request_.scale != nullptr ? plan.header->size : 0;
  channels_ = &channels;

  ports_.clear();
  for (const plan::Channel& channel : plan.channels) {
    const int peer = static_cast<int>(channel.peer);
    if (static_cast<plan::Direction>(channel.direction) == plan::Direction::kSend) {
      ports_.push_back({peer, &channels.send_channel(peer, channel.number), nullptr,
                        &channels.send_turn(peer, channel.number)});
    } else {
      ports_.push_back({peer, nullptr, &channels.recv_channel(peer, channel.number),
                        &channels.recv_turn(peer, channel.number)});
    }
  }
  find_last_rows();
  find_sharers();
  find_landings();
  make_lanes();
  return Status();
}

void Execution::begin(std::uint64_t sequence, const std::byte* input, std::byte* output) {
  if (wire_.used()) wire_.begin(&input, &output);
  bound_.move_to(input, output);
  // What is reduced in place is in a cache, since it was read a moment ago; unless there were so
  // many others to read from in between. From 5 ranks on all_reduce of 8 MiB and more took 0.82 to
  // 0.96 of its time past the caches, and of 4 MiB 0.86 to 1.04; with 2 and 3 ranks 1.0 to 1.4.
  streams_ = large_ && (input != output || !fresh_ || spread_);
  own_ = own_part(input == output);
  header_.sequence = sequence;
  sweep_.backwards = sweeps() && channels_->sweeps()++ % 2 != 0;
  odd_peer_ = -1;
  has_all_turns_ = true;
  for (Port& port : ports_) {
    port.ticket = port.turn->issued++;
    port.passed_on = port.lent = false;
    has_all_turns_ &= port.turn->served == port.ticket;
  }
  lends_ = false;
  for (Lane& lane : lanes_) {
    lane.next = lane.begin;
    lane.handed_over = lane.apart = 0;
    lane.tile = 0;
  }
  if (long_) hold_memory(input, output);
  if (offers_ || is_awaited_) make_offers();
}

// The segment of the row's chunk in this tile, in elements; false if the row has nothing to do.
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
    return tile == 0;  // travels empty, so that ranks compare what they are doing
  }
  if (sweep_.backwards) *offset = sweep_.segment(tile, div_ceil(bound.length, segment)) * segment;
  *length = std::min(segment, bound.length - *offset);
  return true;
}

// Finds the segment at the head of every receive channel; kMoved when all are there and belong
// here.
Progress Execution::collect(const plan::Row& row, std::size_t bytes, Collected* all) {
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
        header.bytes != bytes ||
        (segment->placed && !(offers_ && (row.flags & plan::kFlagLand) != 0))) {
      odd_peer_ = port.peer;
      return Progress::kDisagree;
    }
    all->received[i] = segment->data;
    all->lent |= segment->lent;
    all->placed |= segment->placed;
  }
  return Progress::kMoved;
}

// Gives back a segment of an operation that was dropped.
bool Execution::skips(const Port& port, std::uint64_t sequence) {
  if (!channels_->is_dropped(sequence)) return false;
  port.recv->release();
  return true;
}

// Whether memory that this operation handed over may still be read in the row's target.
bool Execution::reads(const std::byte* target, std::size_t bytes) const {
  // In memory of several arrays the target is no address yet.
  const bool whole = !request_.parts.empty();
  return std::any_of(ports_.begin(), ports_.end(), [&](const Port& port) {
    if (port.send == nullptr || port.passed_on) return false;
    return whole ? !port.send->flushed() : port.send->reads(target, bytes);
  });
}

// Whether what the row has just read was what its peers had sent, all of it.
bool Execution::intact(const plan::Row& row) const {
  return std::all_of(row.recv, row.recv + row.recv_count,
                     [this](std::uint16_t index) { return ports_[index].recv->intact(); });
}

// What the row combines, in its order, and the local memory where the result goes.
void Execution::gather(const BoundRow& bound, const std::byte* const* received, std::size_t skip,
                       Gathered* all) {
  // Scratch is one segment and starts at zero in every tile; input and output advance.
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
  if (!has_turns(row)) return Progress::kBlocked;
  const std::size_t bytes = length * bound_.item_bytes();
  header_.bytes = static_cast<std::uint32_t>(bytes);

  Collected arrived;
  const Progress ready = collect(row, bytes, &arrived);
  if (ready != Progress::kMoved) return ready;
  const std::size_t skip = offset * bound_.item_bytes();
  Gathered all;
  gather(bound, arrived.received, skip, &all);
  if (arrived.placed) all.operands[0] = all.target;
  if (all.target != nullptr && (row.flags & plan::kFlagFlush) != 0 && reads(all.target, bytes)) {
    return Progress::kBlocked;
  }
  // Nothing changes the caller's memory before it is sent; scratch is used again.
  const auto source = static_cast<plan::Buffer>(row.source);
  const bool stable = source != plan::Buffer::kNone && source != plan::Buffer::kScratch;
  const bool direct =
      stable && row.recv_count == 0 && row.send_count > 0 && bind_part(row, bytes, &all);
  const bool has_room =
      direct ? hand_over(lane, skip, all.operands[0]) : reserve(bound, skip, &all);
  if (!has_room) return Progress::kBlocked;
  if (length != 0 && (all.target != nullptr || all.room_count != 0)) {
    request_.parts.empty() ? combine(row, all, length) : combine_parts(row, all, length);
  }
  if (spoiled()) return Progress::kSpoiled;
  if (streams_) stream_fence();
  // What a failing peer took back is used no further; that it has failed will be heard.
  if (arrived.lent && !intact(row)) return Progress::kBlocked;
  if (!direct) commit(row, all);
  for (int i = 0; i < row.recv_count; ++i) ports_[row.recv[i]].recv->release();
  return Progress::kMoved;
}

bool Execution::spoiled() const {
  return request_.reduction_failed != nullptr &&
         request_.reduction_failed->load(std::memory_order_relaxed);
}

// From the left, as many operands at once as a kernel takes. `result` may be one of the operands,
// so only the last call writes there.
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
  // In place it is there already.
  if (all.target != nullptr && all.target != from) {
    streams_ ? stream_copy(all.target, from, bytes) : copy_bytes(all.target, from, bytes);
  }
  for (int i = 0; i < all.room_count; ++i) all.rooms[i].fill(0, from, bytes);
}

void Execution::combine(const plan::Row& row, const Gathered& all, std::uint64_t length) const {
  const std::size_t item = bound_.item_bytes();
  if (all.operand_count == 1) return copy(all, length * item);
  if (all.operand_count == 0) return;
  const bool scaled = scale_divisor_ != 0 && (row.flags & plan::kFlagFinal) != 0;
  // Made in place where that is quick, else beside and copied.
  const bool into_room =
      all.target == nullptr && !all.rooms[0].placed && !all.rooms[0].channel->wants_fill();
  const bool into_target =
      all.target != nullptr &&
      std::none_of(all.operands, all.operands + all.operand_count,
                   [&](const std::byte* operand) { return misleads(all.target, operand); });
  alignas(64) std::byte made[kPieceBytes];
  const std::uint64_t piece = kPieceBytes / item;
  if (into_target && all.room_count == 0 && !scaled && length <= piece) {
    // As the last row of most short operations.
    const void* operands[plan::kOperandsMax];
    std::copy(all.operands, all.operands + all.operand_count, operands);
    return fold(all.target, operands, all.operand_count, length);
  }
  for (std::uint64_t done = 0; done < length; done += piece) {
    const std::uint64_t count = std::min(piece, length - done);
    const std::size_t skip = done * item;
    const void* operands[plan::kOperandsMax];
    for (int i = 0; i < all.operand_count; ++i) operands[i] = all.operands[i] + skip;
    std::byte* result = into_target ? all.target + skip
                        : into_room ? all.rooms[0].data + skip
                                    : made;
    fold(result, operands, all.operand_count, count);
    if (scaled) request_.scale(result, count, scale_divisor_);
    if (all.target != nullptr && !into_target) copy_bytes(all.target + skip, result, count * item);
    for (int i = into_room ? 1 : 0; i < all.room_count; ++i) {
      all.rooms[i].fill(skip, result, count * item);
    }
  }
}

}  // namespace pycoll::runtime
