// Rows with codes (FORMAT.md, "Codecs"). Their segments pass through slot buffers, since nothing in
// the caller's memory holds codes.
#include <algorithm>
#include <cstring>

#include "base/copy.h"
#include "executor/execution.h"
#include "executor/execution_row.h"

namespace pycoll::executor {
namespace {

// Values that a row decodes, folds and encodes before it goes on: whole blocks of every codec, few
// enough for L1.
constexpr std::size_t kPieceValues = kernels::kCodecBlockMax;
constexpr std::size_t kPieceCodes = 2 * kPieceValues;  // bfloat16 has the most bytes to a value

bool is_set(unsigned mask, int bit) { return (mask >> bit & 1) != 0; }

}  // namespace

// A part of the row's segment. `codes` and `values` are those that the takers get.
struct Execution::CodedPiece {
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

void Execution::bind_codec() {
  if (!request_.codec) return;
  codec_ = *request_.codec;
  codec_.seed = kernels::seed_of_rank(codec_.seed, request_.plan->header().rank);
  codec_kernels_ = kernels::codec_kernels(codec_.kind);
}

std::size_t Execution::code_bytes(const plan::Row& row, std::uint64_t length) const {
  return plan::is_coded(row) ? kernels::encoded_bytes(codec_, length) : 0;
}

Progress Execution::run_coded_row(const BoundRow& bound, std::uint64_t offset, std::uint64_t length,
                                  const Collected& arrived, const Gathered& all) {
  const plan::Row& row = *bound.row;
  const std::size_t bytes = length * sizeof(float);
  const std::size_t code_bytes = kernels::encoded_bytes(codec_, length);
  transport::SegmentHeader header = header_;
  std::byte* slots[plan::kSendMax];
  for (int i = 0; i < row.send_count; ++i) {
    slots[i] = ports_[row.send[i]].send->reserve(is_set(row.coded_send, i) ? code_bytes : bytes);
    if (slots[i] == nullptr) return Progress::kBlocked;
  }
  for (std::uint64_t done = 0; done < length; done += kPieceValues) {
    CodedPiece piece{done, std::min(kPieceValues, length - done),
                     kernels::encoded_bytes(codec_, done), 0};
    piece.code_bytes = kernels::encoded_bytes(codec_, piece.count);
    run_coded_piece(bound, offset, all, slots, piece);
  }
  if (streams_) stream_fence();
  // See run_row().
  if (arrived.exposed && !intact(row)) return Progress::kBlocked;
  for (int i = 0; i < row.send_count; ++i) {
    header.bytes = static_cast<std::uint32_t>(is_set(row.coded_send, i) ? code_bytes : bytes);
    ports_[row.send[i]].send->commit(header);
  }
  for (int i = 0; i < row.recv_count; ++i) ports_[row.recv[i]].recv->release();
  return Progress::kMoved;
}

// Makes the codes and the values of the row's result, whichever are needed, and hands them out.
void Execution::run_coded_piece(const BoundRow& bound, std::uint64_t offset, const Gathered& all,
                                std::byte* const* slots, CodedPiece piece) {
  const plan::Row& row = *bound.row;
  alignas(64) float made[kPieceValues];
  alignas(64) std::byte codes[kPieceCodes];
  const bool into_scratch = (row.coded_local & plan::kCodedTarget) != 0;
  std::byte* target =
      all.target == nullptr || into_scratch ? nullptr : all.target + piece.first * sizeof(float);
  const bool wants_values = target != nullptr || row.coded_send != (1u << row.send_count) - 1;
  // A result that bypasses the caches is made in L1 and then copied.
  float* decoded = target != nullptr && !streams_ ? reinterpret_cast<float*>(target) : made;
  if (plan::passes_codes(row)) {
    piece.codes = piece.in(all.operands[0], true);
  } else {
    piece.values = fold_codes(row, all, piece, made);
    if ((row.coded_local & plan::kEncode) != 0) {
      encode_piece(bound, offset, piece, made, codes);
      piece.codes = codes;
    }
  }
  if (piece.codes != nullptr && wants_values) {
    codec_kernels_.decode(decoded, piece.codes, piece.count, codec_);
    piece.values = decoded;
  }
  hand_out(row, all, slots, piece);
}

// Folds the operands from the left, in full precision. The result is in `made`, or it is the only
// operand.
const float* Execution::fold_codes(const plan::Row& row, const Gathered& all,
                                   const CodedPiece& piece, float* made) const {
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
      codec_kernels_.decode(made, operand, piece.count, codec_);
    } else if (result == nullptr) {
      result = reinterpret_cast<const float*>(operand);
      continue;
    } else {
      if (coded && result != made) std::memcpy(made, result, piece.count * sizeof(float));
      if (coded) {
        codec_kernels_.decode_add(made, operand, piece.count, codec_);
      } else {
        const void* both[] = {result, operand};
        request_.combine.function(made, both, 2, piece.count, request_.combine.context);
      }
    }
    result = made;
  }
  if (scale_divisor_ != 0 && (row.flags & plan::kFlagFinal) != 0) {
    request_.scale(made, piece.count, scale_divisor_);
  }
  return result;
}

// Encodes the values, with what earlier calls left out of them.
void Execution::encode_piece(const BoundRow& bound, std::uint64_t offset, const CodedPiece& piece,
                             float* made, std::byte* codes) {
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
  codec_kernels_.encode(codes, rests, values, piece.count, first + offset + piece.first, codec_);
}

// Copies the piece to the target and to the slot buffers.
void Execution::hand_out(const plan::Row& row, const Gathered& all, std::byte* const* slots,
                         const CodedPiece& piece) const {
  const auto copy = [&](std::byte* base, bool coded, transport::StoreHints* hints) {
    const auto* from = coded ? piece.codes : reinterpret_cast<const std::byte*>(piece.values);
    const std::size_t bytes = coded ? piece.code_bytes : piece.count * sizeof(float);
    std::byte* to = base + (coded ? piece.code_skip : piece.first * sizeof(float));
    if (to != from) transport::fill_slot_buffer(hints, to, from, bytes);
  };
  const bool is_result = static_cast<plan::Buffer>(row.target) == plan::Buffer::kOutput;
  if (is_result && streams_) {
    stream_copy(all.target + piece.first * sizeof(float),
                reinterpret_cast<const std::byte*>(piece.values), piece.count * sizeof(float));
  } else if (all.target != nullptr) {
    copy(all.target, (row.coded_local & plan::kCodedTarget) != 0, nullptr);
  }
  for (int i = 0; i < row.send_count; ++i) {
    copy(slots[i], is_set(row.coded_send, i), abilities_[row.send[i]].send.store_hints);
  }
}

}  // namespace pycoll::executor
