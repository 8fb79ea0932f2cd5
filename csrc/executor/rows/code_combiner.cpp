#include "executor/rows/code_combiner.h"

#include <algorithm>
#include <cstring>

#include "base/copy.h"
#include "kernels/dispatch.h"

namespace pycoll::executor {
namespace {

// Values that a row decodes, folds and encodes before it goes on: whole blocks of every codec, few
// enough for L1.
constexpr std::size_t kPieceValues = kernels::kCodecBlockMax;
constexpr std::size_t kPieceCodes = 2 * kPieceValues;  // bfloat16 has the most bytes to a value

bool is_set(unsigned mask, int bit) { return (mask >> bit & 1) != 0; }

}  // namespace

// A part of the row's segment. The target and the slot buffers get `codes` or `values`.
struct CodeCombiner::Piece {
  std::uint64_t first;     // number of its first value in the segment
  std::size_t count;       // values
  std::size_t code_skip;   // bytes of codes in front of it
  std::size_t code_bytes;  // bytes of its own codes
  const std::byte* codes = nullptr;
  const float* values = nullptr;

  const std::byte* in(const std::byte* base, bool coded) const {
    return base + (coded ? code_skip : first * sizeof(float));
  }
};

void CodeCombiner::bind(const CollectiveRequest& request) {
  if (!request.codec) return;
  codec_ = *request.codec;
  codec_.seed = kernels::seed_of_rank(codec_.seed, request.plan->header().rank);
  kernels_ = kernels::codec_kernels(codec_.kind);
  combine_ = request.combine;
  scale_ = request.scale;
  divisor_ = request.plan->contributors();
}

void CodeCombiner::run(const BoundRow& bound, Range segment, const Gathered& all,
                       bool streams) const {
  for (std::uint64_t done = 0; done < segment.length; done += kPieceValues) {
    Piece piece{done, std::min(kPieceValues, segment.length - done), code_bytes(done), 0};
    piece.code_bytes = code_bytes(piece.count);
    run_piece(bound, segment.offset, all, streams, piece);
  }
  if (streams) stream_fence();
}

// Makes the codes and the values of the row's result, as far as needed, and stores them.
void CodeCombiner::run_piece(const BoundRow& bound, std::uint64_t offset, const Gathered& all,
                             bool streams, Piece piece) const {
  const plan::Row& row = *bound.row;
  alignas(64) float made[kPieceValues];
  alignas(64) std::byte codes[kPieceCodes];
  const bool into_scratch = (row.coded_local & plan::kCodedTarget) != 0;
  std::byte* target =
      all.target == nullptr || into_scratch ? nullptr : all.target + piece.first * sizeof(float);
  const bool wants_values = target != nullptr || row.coded_send != (1u << row.send_count) - 1;
  // A result that bypasses the caches is made in L1 and then copied.
  float* decoded = target != nullptr && !streams ? reinterpret_cast<float*>(target) : made;
  if (plan::passes_codes(row)) {
    piece.codes = piece.in(all.operands[0], true);
  } else {
    piece.values = fold(row, all, piece, made);
    if ((row.coded_local & plan::kEncode) != 0) {
      encode(bound, offset, piece, made, codes);
      piece.codes = codes;
    }
  }
  if (piece.codes != nullptr && wants_values) {
    kernels_.decode(decoded, piece.codes, piece.count, codec_);
    piece.values = decoded;
  }
  hand_out(row, all, streams, piece);
}

// Folds the operands from the left, in full precision. Returns `made`, or the memory of the only
// operand if that is values.
const float* CodeCombiner::fold(const plan::Row& row, const Gathered& all, const Piece& piece,
                                float* made) const {
  const bool source_coded = (row.coded_local & plan::kCodedSource) != 0;
  const float* result = nullptr;
  int arrived = 0;
  for (int i = 0; i < all.operand_count; ++i) {
    const bool carried = row.carry != 0 && i == 0;
    const bool local = i == all.local;
    const bool coded = local ? source_coded : !carried && is_set(row.coded_recv, arrived);
    if (!local && !carried) ++arrived;
    const std::byte* operand = piece.in(all.operands[i], coded);
    if (result == nullptr && coded) {
      kernels_.decode(made, operand, piece.count, codec_);
    } else if (result == nullptr) {
      result = reinterpret_cast<const float*>(operand);
      continue;
    } else {
      if (coded && result != made) std::memcpy(made, result, piece.count * sizeof(float));
      if (coded) {
        kernels_.decode_add(made, operand, piece.count, codec_);
      } else {
        const void* both[] = {result, operand};
        combine_.function(made, both, 2, piece.count, combine_.context);
      }
    }
    result = made;
  }
  if (scale_ != nullptr && (row.flags & plan::kFlagFinal) != 0) {
    scale_(made, piece.count, divisor_);
  }
  return result;
}

// Adds the residual, if the call has one, to the values and encodes the sum. The residual becomes
// the part of the sum that the codes leave out. `made` may hold the values; it then gets the sum.
void CodeCombiner::encode(const BoundRow& bound, std::uint64_t offset, const Piece& piece,
                          float* made, std::byte* codes) const {
  const std::uint64_t first = kernels::first_of_chunk(bound.row->chunk);
  const float* values = piece.values;
  float* rests = nullptr;
  if (bound.residual != nullptr) {
    rests = bound.residual + offset + piece.first;
    const void* both[] = {values, rests};
    const kernels::Combine add = kernels::combine_for(DType::kFloat32, ReduceOp::kSum);
    add.function(made, both, 2, piece.count, add.context);
    values = made;
  }
  kernels_.encode(codes, rests, values, piece.count, first + offset + piece.first, codec_);
}

// Copies the piece to the target and to the slot buffers.
void CodeCombiner::hand_out(const plan::Row& row, const Gathered& all, bool streams,
                            const Piece& piece) {
  const auto* values = reinterpret_cast<const std::byte*>(piece.values);
  const std::size_t value_skip = piece.first * sizeof(float);
  const std::size_t value_bytes = piece.count * sizeof(float);
  if (all.target != nullptr) {
    const bool coded = (row.coded_local & plan::kCodedTarget) != 0;
    const bool is_result = static_cast<plan::Buffer>(row.target) == plan::Buffer::kOutput;
    std::byte* to = all.target + (coded ? piece.code_skip : value_skip);
    const std::byte* from = coded ? piece.codes : values;
    const std::size_t bytes = coded ? piece.code_bytes : value_bytes;
    if (is_result && streams) {
      stream_copy(to, from, bytes);
    } else if (to != from) {
      copy_bytes(to, from, bytes);
    }
  }
  for (int i = 0; i < all.slot_buffer_count; ++i) {
    if (is_set(row.coded_send, i)) {
      all.slot_buffers[i].fill(piece.code_skip, piece.codes, piece.code_bytes);
    } else {
      all.slot_buffers[i].fill(value_skip, values, value_bytes);
    }
  }
}

}  // namespace pycoll::executor
