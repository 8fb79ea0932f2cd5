#include "executor/rows/combiner.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "base/assert.h"
#include "base/cache.h"
#include "base/copy.h"

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

// Requires: `buffer` is memory of the caller.
bool is_input(std::uint8_t buffer) {
  return static_cast<plan::Buffer>(buffer) == plan::Buffer::kInput;
}

// Iterates over the arrays of a call from a virtual address on. The first array is searched once
// per segment; then the walk goes from array to array.
class PartWalk {
 public:
  // Requires: `place` is a virtual address in the inputs of `request`'s parts if `reads`, else in
  // their outputs.
  PartWalk(const CollectiveRequest& request, bool reads, const std::byte* place) : reads_(reads) {
    const std::byte* first = reads ? request.input.data : request.output.data;
    const auto offset = static_cast<std::uint64_t>(place - first);
    part_ = std::upper_bound(request.parts.begin(), request.parts.end(), offset,
                             [](std::uint64_t at, const Part& one) { return at < one.end; });
    PYCOLL_ASSERT(part_ != request.parts.end(), "offset %llu is behind all parts",
                  static_cast<unsigned long long>(offset));
    left_ = part_->end - offset;
    skip_ = offset - (part_ == request.parts.begin() ? 0 : std::prev(part_)->end);
  }

  std::byte* address() const {
    return (reads_ ? const_cast<std::byte*>(part_->input) : part_->output) + skip_;
  }

  // Contiguous bytes at this position; more than 0.
  std::uint64_t left() const { return left_; }

  // Requires: bytes <= left(); if they are equal, another array follows.
  void advance(std::uint64_t bytes) {
    skip_ += bytes;
    left_ -= bytes;
    if (left_ != 0) return;
    const std::uint64_t end = part_->end;
    ++part_;
    skip_ = 0;
    left_ = part_->end - end;
  }

 private:
  bool reads_;
  std::vector<Part>::const_iterator part_;
  std::uint64_t left_;
  std::uint64_t skip_;
};

}  // namespace

// Copies bypass the caches if the memory is evicted before its next use. Data that is reduced in
// place has just been read and is still cached, so its copies go through the caches. This does not
// hold if a tile reads more than the cache keeps: then all copies bypass it.
void Combiner::bind(const CollectiveRequest& request, std::size_t item_bytes,
                    std::size_t uncached_bytes) {
  const plan::Plan& plan = request.plan->plan();
  combine_ = request.combine;
  scale_ = request.scale;
  divisor_ = request.plan->contributors();
  reduction_failed_ = request.reduction_failed;
  parts_of_ = request.parts.empty() ? nullptr : &request;
  item_bytes_ = item_bytes;
  streaming_ = Streaming::kNever;
  if (request.input.bytes + request.output.bytes < uncached_bytes || !leaves_output(plan)) return;
  const bool exceeds_cache = bytes_read(plan, request.segment_bytes) > core_cache_bytes() / 4 * 3;
  streaming_ = !combines(plan) || exceeds_cache ? Streaming::kAlways : Streaming::kNotInPlace;
}

void Combiner::begin(bool in_place) {
  streams_ =
      streaming_ == Streaming::kAlways || (streaming_ == Streaming::kNotInPlace && !in_place);
}

bool Combiner::find_contiguous(const plan::Row& row, std::size_t bytes, Gathered* all) const {
  if (parts_of_ == nullptr || bytes == 0) return true;
  if (all->target != nullptr) return false;
  const PartWalk walk(*parts_of_, is_input(row.source), all->operands[all->local]);
  if (walk.left() < bytes) return false;
  all->operands[all->local] = walk.address();
  return true;
}

void Combiner::run(const plan::Row& row, const Gathered& all, std::uint64_t length) const {
  parts_of_ == nullptr ? combine(row, all, length) : combine_parts(row, all, length);
  if (streams_) stream_fence();
}

// combine(), piece by piece where the memory is not contiguous. Requires: the call has several
// arrays.
void Combiner::combine_parts(const plan::Row& row, const Gathered& all,
                             std::uint64_t length) const {
  const bool reads = all.local >= 0 && in_memory(row.source);
  const bool writes = all.target != nullptr && in_memory(row.target);
  if (!reads && !writes) return combine(row, all, length);
  std::optional<PartWalk> source;
  std::optional<PartWalk> target;
  if (reads) source.emplace(*parts_of_, is_input(row.source), all.operands[all.local]);
  if (writes) target.emplace(*parts_of_, is_input(row.target), all.target);
  Gathered piece = all;
  for (std::uint64_t left = length * item_bytes_; left != 0;) {
    std::uint64_t run = left;
    if (source) {
      run = std::min(run, source->left());
      piece.operands[piece.local] = source->address();
    }
    if (target) {
      run = std::min(run, target->left());
      piece.target = target->address();
    }
    combine(row, piece, run / item_bytes_);
    left -= run;
    if (left == 0) break;
    if (source) source->advance(run);
    if (target) target->advance(run);
    for (int i = 0; i < piece.operand_count; ++i) piece.operands[i] += run;
    for (int i = 0; i < piece.slot_buffer_count; ++i) piece.slot_buffers[i].data += run;
    if (piece.target != nullptr) piece.target += run;
  }
}

// Folds from the left, with as many operands per call as a kernel takes. `result` may be one of the
// operands, so only the last call writes to it.
void Combiner::fold(void* result, const void** operands, int operand_count,
                    std::uint64_t count) const {
  alignas(64) std::byte partial[kPieceBytes];
  while (operand_count > kernels::kSourcesMax) {
    combine_.function(partial, operands, kernels::kSourcesMax, count, combine_.context);
    operands += kernels::kSourcesMax - 1;
    operand_count -= kernels::kSourcesMax - 1;
    operands[0] = partial;
  }
  combine_.function(result, operands, operand_count, count, combine_.context);
}

void Combiner::copy(const Gathered& all, std::size_t bytes) const {
  const std::byte* from = all.operands[0];
  // In place, the target holds the data already.
  if (all.target != nullptr && all.target != from) {
    streams_ ? stream_copy(all.target, from, bytes) : copy_bytes(all.target, from, bytes);
  }
  for (int i = 0; i < all.slot_buffer_count; ++i) all.slot_buffers[i].fill(0, from, bytes);
}

void Combiner::combine(const plan::Row& row, const Gathered& all, std::uint64_t length) const {
  if (all.operand_count == 1) return copy(all, length * item_bytes_);
  if (all.operand_count == 0) return;
  const bool scaled = scale_ != nullptr && (row.flags & plan::kFlagFinal) != 0;
  // The result is computed in a slot buffer or in the target where stores are fast, else in a
  // temporary buffer and then copied.
  const bool into_slot_buffer = all.target == nullptr && all.slot_buffers[0].suits_results();
  const bool into_target =
      all.target != nullptr &&
      std::none_of(all.operands, all.operands + all.operand_count,
                   [&](const std::byte* operand) { return aliases_4k(all.target, operand); });
  alignas(64) std::byte made[kPieceBytes];
  const std::uint64_t piece = kPieceBytes / item_bytes_;
  if (into_target && all.slot_buffer_count == 0 && !scaled && length <= piece) {
    // The common case: the last row of a short operation.
    const void* operands[plan::kOperandsMax];
    std::copy(all.operands, all.operands + all.operand_count, operands);
    return fold(all.target, operands, all.operand_count, length);
  }
  for (std::uint64_t done = 0; done < length; done += piece) {
    const std::uint64_t count = std::min(piece, length - done);
    const std::size_t skip = done * item_bytes_;
    const void* operands[plan::kOperandsMax];
    for (int i = 0; i < all.operand_count; ++i) operands[i] = all.operands[i] + skip;
    std::byte* result = into_target        ? all.target + skip
                        : into_slot_buffer ? all.slot_buffers[0].data + skip
                                           : made;
    fold(result, operands, all.operand_count, count);
    if (scaled) scale_(result, count, divisor_);
    if (all.target != nullptr && !into_target) {
      copy_bytes(all.target + skip, result, count * item_bytes_);
    }
    for (int i = into_slot_buffer ? 1 : 0; i < all.slot_buffer_count; ++i) {
      all.slot_buffers[i].fill(skip, result, count * item_bytes_);
    }
  }
}

}  // namespace pycoll::executor
