// Rows over memory that consists of several arrays. Plans, segments and peers treat the arrays as
// one concatenated array. An address in such memory is virtual: the first array's address plus the
// offset in the concatenation. Only this file translates virtual addresses to real ones.
#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "base/assert.h"
#include "executor/execution.h"
#include "executor/execution_row.h"

namespace pycoll::executor {
// Iterates over the arrays from a virtual address on. The first array is searched once per segment;
// then the walk goes from array to array.
class Execution::Walk {
 public:
  // Requires: `place` is a virtual address in the inputs of
  // `request`'s parts if `reads`, else in their outputs.
  Walk(const CollectiveRequest& request, bool reads, const std::byte* place) : reads_(reads) {
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

namespace {

// Requires: `buffer` is memory of the caller.
bool is_input(std::uint8_t buffer) {
  return static_cast<plan::Buffer>(buffer) == plan::Buffer::kInput;
}

}  // namespace

// Whether the row may send its own memory directly: the memory is contiguous, and the row has no
// target. Replaces the operand's virtual address by the real one.
bool Execution::bind_part(const plan::Row& row, std::size_t bytes, Gathered* all) const {
  if (request_.parts.empty() || bytes == 0) return true;
  if (all->target != nullptr) return false;
  const Walk walk(request_, is_input(row.source), all->operands[all->local]);
  if (walk.left() < bytes) return false;
  all->operands[all->local] = walk.address();
  return true;
}

// combine(), piece by piece where the memory is not contiguous. Requires: the request has parts.
void Execution::combine_parts(const plan::Row& row, const Gathered& all,
                              std::uint64_t length) const {
  const bool reads = all.local >= 0 && in_memory(row.source);
  const bool writes = all.target != nullptr && in_memory(row.target);
  if (!reads && !writes) return combine(row, all, length);
  std::optional<Walk> source;
  std::optional<Walk> target;
  if (reads) source.emplace(request_, is_input(row.source), all.operands[all.local]);
  if (writes) target.emplace(request_, is_input(row.target), all.target);
  Gathered piece = all;
  for (std::uint64_t left = length * bound_.item_bytes(); left != 0;) {
    std::uint64_t run = left;
    if (source) {
      run = std::min(run, source->left());
      piece.operands[piece.local] = source->address();
    }
    if (target) {
      run = std::min(run, target->left());
      piece.target = target->address();
    }
    combine(row, piece, run / bound_.item_bytes());
    left -= run;
    if (left == 0) break;
    if (source) source->advance(run);
    if (target) target->advance(run);
    for (int i = 0; i < piece.operand_count; ++i) piece.operands[i] += run;
    for (int i = 0; i < piece.slot_buffer_count; ++i) piece.slot_buffers[i].data += run;
    if (piece.target != nullptr) piece.target += run;
  }
}

}  // namespace pycoll::executor
