// Computes the results of rows with codes (FORMAT.md, "Codecs"), as the combiner does for the
// others. Their segments pass through slot buffers, since nothing in the caller's memory holds
// codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "executor/request.h"
#include "executor/rows/gathered.h"
#include "kernels/codecs.h"

namespace pycoll::executor {

// One thread at a time. No function allocates.
class CodeCombiner {
 public:
  void bind(const CollectiveRequest& request);

  // Bytes of the codes of `length` elements. Requires: the request has a codec.
  std::size_t code_bytes(std::uint64_t length) const {
    return kernels::encoded_bytes(codec_, length);
  }
  // Makes the result of a row for this part of its chunk: codes, values or both, as the target and
  // the slot buffers need them. `all` has one slot buffer for each send of the row. `streams`:
  // copies to the output use non-temporal stores. Later stores come after those of the result.
  void run(const BoundRow& bound, Range segment, const Gathered& all, bool streams) const;

 private:
  struct Piece;

  void run_piece(const BoundRow& bound, std::uint64_t offset, const Gathered& all, bool streams,
                 Piece piece) const;
  const float* fold(const plan::Row& row, const Gathered& all, const Piece& piece,
                    float* made) const;
  void encode(const BoundRow& bound, std::uint64_t offset, const Piece& piece, float* made,
              std::byte* codes) const;
  static void hand_out(const plan::Row& row, const Gathered& all, bool streams, const Piece& piece);

  kernels::Codec codec_;  // of the plan's codes; its seed is this rank's own
  kernels::CodecKernels kernels_;
  kernels::Combine combine_;
  kernels::ScaleFunction scale_ = nullptr;
  std::uint32_t divisor_ = 1;  // of final values, if there is a scale
};

}  // namespace pycoll::executor
