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
  void add(DType dtype, ReduceOp op, int axes, const std::int64_t* lengths) {
    words_.push_back(static_cast<std::int64_t>(axes) << 16 | static_cast<std::int64_t>(dtype) << 8 |
                     static_cast<std::int64_t>(op));
    words_.insert(words_.end(), lengths, lengths + axes);
    ++size_;
  }
  void clear() {
    words_.clear();
    size_ = 0;
  }

  std::size_t size() const { return size_; }
  // A hash of all arrays; equal on ranks whose arrays are equal.
  std::uint64_t key() const;
  // A hash of the existing arrays with an index in [begin, end).
  std::uint32_t digest(std::size_t begin, std::size_t end) const;
  // "arrays[1] of 2: float32, op sum, shape (3, 2)"; of a single array "shape (3, 2)"; for an index
  // outside "2 arrays, no arrays[2]". A text of more than `most` characters is cut.
  std::string text(std::size_t index, std::size_t most) const;

 private:
  // Place of an array in `words_`; the end for an array that does not exist.
  std::size_t place_of(std::size_t index) const;

  // Each array: its number of axes, dtype and op in one word, and then its lengths.
  std::vector<std::int64_t> words_;
  std::size_t size_ = 0;
};

}  // namespace pycoll::executor
