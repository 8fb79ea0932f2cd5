#include "executor/bound_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/bytes.h"

namespace pycoll::executor {
namespace {

// Scratch slots start on cache lines, so that no two slots share a line.
constexpr std::size_t kSlotAlignment = 64;
constexpr std::size_t kSlotBytes = transport::kSegmentBytesMax;
// The longest segment of a plan whose data travels only as codes, in bytes of values.
constexpr std::size_t kCodedSegmentMax = 16 * kSlotBytes;

// Checks that each part has whole elements and that all
// parts together have the bytes of input and output.
Status check_parts(const CollectiveRequest& request, std::size_t item_bytes) {
  if (request.parts.empty()) return Status();
  std::uint64_t end = 0;
  for (const Part& part : request.parts) {
    if (part.end <= end || part.end % item_bytes != 0) {
      return invalid_argument("a part of the memory ends at byte " + std::to_string(part.end) +
                              ": expected whole elements of " + std::to_string(item_bytes) +
                              " bytes behind byte " + std::to_string(end));
    }
    end = part.end;
  }
  if (end == request.input.bytes && end == request.output.bytes) return Status();
  return invalid_argument("the parts of the memory have " + std::to_string(end) + " bytes, input " +
                          std::to_string(request.input.bytes) + " and output " +
                          std::to_string(request.output.bytes));
}

// Checks that the call has a codec if the plan has codes, and that the codec can hold the call's
// elements.
Status check_codec(const CollectiveRequest& request) {
  const auto rows = request.plan->plan().rows;
  const bool coded = std::any_of(rows.begin(), rows.end(), plan::is_coded);
  if (!request.codec) {
    return coded ? invalid_argument("the plan has codes, and the call has no codec") : Status();
  }
  const transport::Descriptor& descriptor = request.descriptor;
  if (descriptor.dtype != DType::kFloat32 || request.form) {
    return invalid_argument("a codec holds float32, not " + std::string(name_of(descriptor.dtype)));
  }
  const bool sums = descriptor.op == ReduceOp::kSum || descriptor.op == ReduceOp::kAvg;
  if (!sums) {
    return invalid_argument("op is " + std::string(name_of(descriptor.op)) +
                            ": with a codec it is sum or avg");
  }
  if (!request.parts.empty()) return invalid_argument("a codec takes one array, not several");
  if (!kernels::valid(*request.codec)) return invalid_argument("the codec is not defined");
  const std::uint64_t residual = request.residual.bytes;
  if (request.residual.data != nullptr && residual != request.input.bytes) {
    return invalid_argument("the residual has " + std::to_string(residual) + " bytes, the input " +
                            std::to_string(request.input.bytes));
  }
  return Status();
}

// Whether all data travels as codes, so that a segment may have more values than a slot buffer
// holds.
bool sends_codes_only(const plan::Plan& plan) {
  return std::all_of(plan.rows.begin(), plan.rows.end(), [](const plan::Row& row) {
    return row.chunk == plan::kToken || (row.coded_recv == (1u << row.recv_count) - 1 &&
                                         row.coded_send == (1u << row.send_count) - 1);
  });
}

// More than the memory of any host, and small enough that no sum of offsets overflows.
constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 62;

}  // namespace

Status BoundPlan::measure(const CollectiveRequest& request) {
  const plan::Header& header = request.plan->header();
  if (request.counts.size() != header.block_count) {
    return invalid_argument("counts has " + std::to_string(request.counts.size()) +
                            " entries, the plan has " + std::to_string(header.block_count) +
                            " blocks");
  }
  item_bytes_ = pycoll::item_bytes(request.form ? request.form.dtype : request.descriptor.dtype);
  const bool coded = request.codec && sends_codes_only(request.plan->plan());
  const std::size_t longest_segment = coded ? kCodedSegmentMax : kSlotBytes;
  if (request.segment_bytes < item_bytes_ || request.segment_bytes > longest_segment) {
    return invalid_argument("segment_bytes is " + std::to_string(request.segment_bytes) +
                            ", allowed are " + std::to_string(item_bytes_) + " to " +
                            std::to_string(longest_segment));
  }
  segment_length_ = request.segment_bytes / item_bytes_;
  if (request.codec) {
    // Whole blocks, so that the codes of a segment do not depend on other segments.
    const std::uint64_t block = request.codec->block;
    segment_length_ = std::max(block, segment_length_ / block * block);
    const std::size_t codes = kernels::encoded_bytes(*request.codec, segment_length_);
    if (codes > kSlotBytes) {
      return invalid_argument("segment_bytes is " + std::to_string(request.segment_bytes) + ": " +
                              std::to_string(codes) + " bytes of codes, allowed are " +
                              std::to_string(kSlotBytes));
    }
  }
  counts_ = request.counts;
  input_offsets_.assign(counts_.size(), 0);
  output_offsets_.assign(counts_.size(), 0);
  receiver_offsets_.assign(counts_.size(), 0);
  held_.clear();
  input_length_ = output_length_ = 0;
  std::uint64_t longest = 0;
  std::uint64_t total = 0;  // bytes of all blocks; bounds the offsets in both buffers
  for (std::uint32_t block = 0; block < header.block_count; ++block) {
    const std::uint64_t count = counts_[block];
    std::uint64_t bytes = 0;
    if (!checked_mul(count, item_bytes_, &bytes) || bytes > kBytesMax - total) {
      return invalid_argument("counts[" + std::to_string(block) + "] is " + std::to_string(count) +
                              ": all blocks together may have at most 2^62 bytes");
    }
    total += bytes;
    longest = std::max(longest, partition(count, header.parts, 0).length);
    input_offsets_[block] = input_length_;
    output_offsets_[block] = output_length_;
    const std::uint32_t group = request.plan->output_group(block);
    held_.resize(std::max<std::size_t>(held_.size(), group + 1));
    receiver_offsets_[block] = std::exchange(held_[group], held_[group] + count);
    if (request.plan->holds_input(block)) input_length_ += count;
    if (request.plan->holds_output(block)) output_length_ += count;
  }
  tiles_ = std::max<std::uint64_t>(1, div_ceil(longest, segment_length_));
  longest_bytes_ = std::min(longest, segment_length_) * item_bytes_;
  // No segment is longer than the longest chunk, so the
  // scratch slots of a short operation are short too.
  const std::size_t segment = std::max<std::size_t>(kSlotBytes, segment_length_ * item_bytes_);
  slot_bytes_ = round_up(std::min<std::size_t>(segment, longest * item_bytes_), kSlotAlignment);
  return Status();
}

BoundPlan::ChunkOffsets BoundPlan::locate(const plan::Header& header, std::uint32_t chunk) const {
  const std::uint32_t block = chunk / header.parts;
  const Range range = partition(counts_[block], header.parts, chunk % header.parts);
  return {input_offsets_[block] + range.offset, output_offsets_[block] + range.offset,
          receiver_offsets_[block] + range.offset, range.length};
}

std::byte* BoundPlan::scratch(std::uint32_t slot) {
  const auto address = reinterpret_cast<std::uintptr_t>(scratch_.data());
  const std::size_t skipped = round_up(address, kSlotAlignment) - address;
  return scratch_.data() + skipped + slot * slot_bytes_;
}

Status BoundPlan::bind(const CollectiveRequest& request) {
  Status status = check_codec(request);
  if (status.ok()) status = measure(request);
  if (!status.ok()) return status;
  const plan::Header& header = request.plan->header();
  if (request.input.bytes != input_length_ * item_bytes_) {
    return invalid_argument("input has " + std::to_string(request.input.bytes) + " bytes, " +
                            std::to_string(input_length_ * item_bytes_) + " were expected");
  }
  if (request.output.bytes != output_length_ * item_bytes_) {
    return invalid_argument("output has " + std::to_string(request.output.bytes) + " bytes, " +
                            std::to_string(output_length_ * item_bytes_) + " were expected");
  }
  if (Status status_of_parts = check_parts(request, item_bytes_); !status_of_parts.ok()) {
    return status_of_parts;
  }
  if (header.scratch_slots != 0) {
    const std::size_t needed = header.scratch_slots * slot_bytes_ + kSlotAlignment;
    if (scratch_.size() < needed) scratch_.resize(needed);
  }
  input_ = request.input.data;
  output_ = request.output.data;
  rows_.resize(request.plan->plan().rows.size());
  for (std::size_t index = 0; index < rows_.size(); ++index) {
    status = bind_row(request, index);
    if (!status.ok()) return status;
  }
  return Status();
}

// Returns the address at the same place of the new input or output. Scratch does not move.
std::byte* BoundPlan::translate(std::byte* at, std::uint8_t buffer, const std::byte* input,
                                std::byte* output) const {
  switch (static_cast<plan::Buffer>(buffer)) {
    case plan::Buffer::kInput:
      return const_cast<std::byte*>(input) + (at - input_);
    case plan::Buffer::kOutput:
      return output + (at - output_);
    case plan::Buffer::kNone:
    case plan::Buffer::kScratch:
      break;
  }
  return at;
}

void BoundPlan::move_to(const std::byte* input, std::byte* output) {
  if (input == input_ && output == output_) return;
  for (BoundRow& bound : rows_) {
    if (bound.row->chunk == plan::kToken) continue;
    bound.source = translate(bound.source, bound.row->source, input, output);
    bound.target = translate(bound.target, bound.row->target, input, output);
  }
  input_ = input;
  output_ = output;
}

Status BoundPlan::bind_row(const CollectiveRequest& request, std::size_t index) {
  const plan::Header& header = request.plan->header();
  const plan::Row& row = request.plan->plan().rows[index];
  BoundRow bound{.row = &row};
  if (row.chunk != plan::kToken && plan::operand_count(row) > 1 && !request.combine) {
    return invalid_argument("row " + std::to_string(index) + " of the plan combines, but op " +
                            std::string(name_of(request.descriptor.op)) + " means nothing for " +
                            std::string(name_of(request.descriptor.dtype)));
  }
  if (row.chunk != plan::kToken) {
    const ChunkOffsets chunk = locate(header, row.chunk);
    const ChunkOffsets source = locate(header, in_memory(row.source) ? row.source_slot : row.chunk);
    const ChunkOffsets target = locate(header, in_memory(row.target) ? row.target_slot : row.chunk);
    if (source.length != chunk.length || target.length != chunk.length) {
      return invalid_argument("row " + std::to_string(index) + " of the plan moves chunk " +
                              std::to_string(row.chunk) + " of " + std::to_string(chunk.length) +
                              " elements between chunks of other lengths");
    }
    bound.length = chunk.length;
    bound.receiver_bytes = chunk.receiver_offset * item_bytes_;
    bound.source = address(row.source, row.source_slot, source, request);
    if (row.carry != 0) bound.carry = scratch(row.carry - 1u);
    bound.target = address(row.target, row.target_slot, target, request);
    rows_[index] = bound;
    if ((row.coded_local & plan::kEncode) != 0) return bind_residual(request, index, chunk);
  }
  rows_[index] = bound;
  return Status();
}

Status BoundPlan::bind_residual(const CollectiveRequest& request, std::size_t index,
                                const ChunkOffsets& chunk) {
  if (request.residual.data == nullptr) return Status();
  const std::uint32_t number = rows_[index].row->chunk;
  if (!request.plan->holds_input(number / request.plan->header().parts)) {
    return invalid_argument("row " + std::to_string(index) + " of the plan encodes chunk " +
                            std::to_string(number) + ", which has no residual on this rank");
  }
  rows_[index].residual = reinterpret_cast<float*>(request.residual.data) + chunk.input_offset;
  return Status();
}

// Address of element 0 of the chunk at `offsets`. validate() has shown that this rank holds the
// chunk, so the address is inside the buffer.
std::byte* BoundPlan::address(std::uint8_t buffer, std::uint32_t slot, const ChunkOffsets& offsets,
                              const CollectiveRequest& request) {
  switch (static_cast<plan::Buffer>(buffer)) {
    case plan::Buffer::kNone:
      break;
    case plan::Buffer::kScratch:
      return scratch(slot);
    case plan::Buffer::kInput:
      PYCOLL_ASSERT(offsets.input_offset + offsets.length <= input_length_,
                    "slot %u past the input", slot);
      return const_cast<std::byte*>(request.input.data) + offsets.input_offset * item_bytes_;
    case plan::Buffer::kOutput:
      PYCOLL_ASSERT(offsets.output_offset + offsets.length <= output_length_,
                    "slot %u past the output", slot);
      return request.output.data + offsets.output_offset * item_bytes_;
  }
  return nullptr;
}

}  // namespace pycoll::executor
