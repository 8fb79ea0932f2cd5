// The arrays of one call, for the errors of ranks whose calls differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace pycoll::executor {

// The arrays of a list or a group, in the order in which the caller passed them, or the one array
// of another call. Only a disagreement of ranks reads it.
class CallArrays {
 public:
  void add(DType dtype, ReduceOp op, int axes, const std::int64_t* lengths);
  void clear();

  std::size_t size() const { return starts_.size(); }
  // A hash of all arrays; equal on ranks whose arrays are equal.
  std::uint64_t key() const { return key_; }
  // A hash of the arrays from `begin` up to and without `end`, as far as they exist.
  std::uint32_t digest(std::size_t begin, std::size_t end) const;
  // "arrays[1] of 2: float32, op sum, shape (3, 2)"; of a single array "shape (3, 2)"; for an index
  // outside "2 arrays, no arrays[2]". A text of more than `most` characters is cut.
  std::string text(std::size_t index, std::size_t most) const;

 private:
  // Each array: its number of axes, dtype and op in one word, and then its lengths.
  std::vector<std::int64_t> words_;
  std::vector<std::size_t> starts_;  // of each array in `words_`
  std::uint64_t key_ = 0;
};

}  // namespace pycoll::executor
