// The positions of an operation in its lanes. Each lane runs all its rows in each tile. Lanes walk
// independently of each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "executor/bound_plan.h"
#include "executor/traversal.h"
#include "plan/image.h"
#include "plan/plan.h"

namespace pycoll::executor {

// A lane of the plan, or one of its two halves: the leading rows, which may run tiles ahead
// (FORMAT.md, Leading rows), or the rows behind them.
struct Lane {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  bool follows_leading = false;   // the Lane in front of it holds its leading rows
  std::uint64_t ahead = 0;        // of leading rows: tiles that they may run ahead; 0: no limit
  std::uint32_t next = 0;         // the row that runs next
  std::uint32_t handed_over = 0;  // bit i: send i of the current row is already sent
  // Bit i: send i was exposed or written directly, so it has no slot buffer.
  std::uint32_t apart = 0;
  std::uint64_t tile = 0;

  // Whether all rows of all tiles have run.
  bool has_ended() const { return next == end; }
};

// One thread at a time. bind() keeps the capacity of earlier calls; no other function allocates.
class LaneWalk {
 public:
  // `bound` is the bound plan of `image`.
  void bind(const plan::Image& image, const BoundPlan& bound, std::uint32_t segment_bytes);
  void begin(bool backwards);

  std::size_t size() const { return lanes_.size(); }
  Lane& operator[](std::size_t number) { return lanes_[number]; }
  const Lane& operator[](std::size_t number) const { return lanes_[number]; }
  std::uint64_t tiles() const { return tiles_; }
  bool is_in_last_tile(const Lane& lane) const { return lane.tile + 1 == tiles_; }

  // Whether the lane's next row must not run before the leading rows of its tile.
  bool waits_for_leading(std::size_t number) const;
  // Whether the lane's next row may run, as far as other lanes decide it.
  bool may_run(std::size_t number) const {
    return !waits_for_leading(number) && !is_far_ahead(number);
  }
  // The lane goes to its next row, or to the first row of its next tile; false if it has ended.
  [[nodiscard]] bool step(Lane& lane) const;
  // Number of rows that have run, over all tiles.
  std::uint64_t rows_run() const;

  // The elements of the row's chunk that move in this tile; false if the row has no work in it.
  [[nodiscard]] bool segment_of(const BoundRow& bound, std::uint64_t tile, Range* segment) const;

 private:
  bool is_far_ahead(std::size_t number) const;

  std::vector<Lane> lanes_;
  std::uint64_t tiles_ = 1;
  std::uint64_t segment_length_ = 1;  // elements
  Traversal traversal_;
};

}  // namespace pycoll::executor
