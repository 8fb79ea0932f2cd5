// Lanes, and the order in which their rows run.
#include <algorithm>

#include "executor/execution.h"

namespace pycoll::executor {
namespace {

// Leading rows to several peers run at most this many bytes ahead, but at least two tiles, so that
// the link is never idle. Further ahead, sockets would decide which peer gets its segments first.
constexpr std::uint64_t kAheadBytes = 512 * 1024, kAheadTilesMin = 2;

}  // namespace

// With more than one tile, the leading rows of a lane become a Lane
// of their own, so that they can run tiles ahead.
void Execution::make_lanes() {
  const auto rows = request_.plan->plan().rows;
  const std::vector<std::uint32_t>& leading_rows = request_.plan->leading_rows();
  lanes_.clear();
  std::uint32_t index = 0;
  for (std::uint32_t lane = 0; lane < leading_rows.size(); ++lane) {
    const bool has_leading = leading_rows[lane] != 0 && bound_.tiles() > 1;
    if (has_leading) {
      Lane& leading = lanes_.emplace_back();
      leading.begin = index;
      index += leading_rows[lane];
      leading.end = index;
      leading.ahead = tiles_ahead(rows.subspan(leading.begin, leading_rows[lane]));
    }
    const std::uint32_t begin = index;
    while (index < rows.size() && rows[index].lane == lane) ++index;
    lanes_.push_back({begin, index, has_leading});
  }
}

// How many tiles the leading rows may run ahead; 0: as far as their channel has free slot buffers.
std::uint64_t Execution::tiles_ahead(std::span<const plan::Row> leading) const {
  std::uint64_t segments = 0;
  for (const plan::Row& row : leading) segments += row.send_count;
  if (segments <= 1) return 0;
  return std::max(kAheadTilesMin, kAheadBytes / (segments * request_.segment_bytes));
}

Progress Execution::advance() {
  if (wire_.is_used() && !wire_.enter_some()) return Progress::kMoved;
  if (exposes_) take_back();
  overtaken_ = false;
  // Lanes alternate row by row: a segment that one lane sends is
  // often what another lane of the peer waits for.
  const int rows = lanes_.size() == 1 ? kRowsPerAdvance : 1;
  bool moved = false;
  bool all_done = false;
  bool moves = true;
  for (int run = 0; moves && run < kRowsPerAdvance; run += rows) {
    moves = false;
    all_done = true;
    for (std::size_t number = 0; number < lanes_.size(); ++number) {
      if (lanes_[number].next == lanes_[number].end) continue;
      const Progress progress = advance_lane(number, rows);
      if (progress == Progress::kDisagree || progress == Progress::kSpoiled) return progress;
      moves |= progress != Progress::kBlocked;
      all_done &= progress == Progress::kDone;
    }
    moved |= moves;
  }
  // Memory that peers still read belongs to the caller again only when they have read it.
  if (all_done) {
    if (!pass_on_rest()) return Progress::kBlocked;
    if (wire_.is_used() && !wire_.leave_some()) return Progress::kMoved;
    return Progress::kDone;
  }
  return moved ? Progress::kMoved : Progress::kBlocked;
}

// Runs at most `rows` rows of one lane, until it blocks or ends.
// A lane that has run all tiles has next == end.
Progress Execution::advance_lane(std::size_t number, int rows) {
  Lane& lane = lanes_[number];
  for (int run = 0; run < rows; ++run) {
    const bool waits = waits_for_leading(number) || is_far_ahead(number);
    const Progress progress = waits ? Progress::kBlocked : run_row(lane);
    if (progress == Progress::kBlocked) return run > 0 ? Progress::kMoved : Progress::kBlocked;
    if (progress != Progress::kMoved) return progress;
    lane.handed_over = lane.apart = 0;
    const std::uint32_t index = lane.next++;
    if (lane.tile + 1 == bound_.tiles()) pass_on_behind(*bound_.rows()[index].row, index);
    if (lane.next < lane.end) continue;
    if (++lane.tile == bound_.tiles()) return Progress::kDone;
    lane.next = lane.begin;
  }
  return Progress::kMoved;
}

std::uint64_t Execution::progress() const {
  std::uint64_t rows = 0;
  for (const Lane& lane : lanes_) rows += lane.tile * (lane.end - lane.begin) + lane.next;
  return rows;
}

bool Execution::is_far_ahead(std::size_t number) const {
  const Lane& lane = lanes_[number];
  return lane.ahead != 0 && lane.tile >= lanes_[number + 1].tile + lane.ahead;
}

bool Execution::waits_for_leading(std::size_t number) const {
  const Lane& lane = lanes_[number];
  if (!lane.follows_leading) return false;
  const Lane& leading = lanes_[number - 1];
  return leading.next != leading.end && leading.tile <= lane.tile;
}

}  // namespace pycoll::executor
