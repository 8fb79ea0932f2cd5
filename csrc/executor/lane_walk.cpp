#include "executor/lane_walk.h"

#include <algorithm>

namespace pycoll::executor {
namespace {

// Leading rows to several peers run at most this many bytes ahead, but at least two tiles, so that
// the link is never idle. Further ahead, sockets would decide which peer gets its segments first.
constexpr std::uint64_t kAheadBytes = 512 * 1024, kAheadTilesMin = 2;

// How many tiles the leading rows may run ahead; 0: as far as their channel has free slot buffers.
std::uint64_t tiles_ahead(std::span<const plan::Row> leading, std::uint32_t segment_bytes) {
  std::uint64_t segments = 0;
  for (const plan::Row& row : leading) segments += row.send_count;
  if (segments <= 1) return 0;
  return std::max(kAheadTilesMin, kAheadBytes / (segments * segment_bytes));
}

}  // namespace

// With more than one tile, the leading rows of a lane become a Lane of their own, so that they can
// run tiles ahead.
void LaneWalk::bind(const plan::Image& image, const BoundPlan& bound, std::uint32_t segment_bytes) {
  tiles_ = bound.tiles();
  segment_length_ = bound.segment_length();
  const auto rows = image.plan().rows;
  const std::vector<std::uint32_t>& leading_rows = image.leading_rows();
  lanes_.clear();
  std::uint32_t index = 0;
  for (std::uint32_t lane = 0; lane < leading_rows.size(); ++lane) {
    const bool has_leading = leading_rows[lane] != 0 && tiles_ > 1;
    if (has_leading) {
      Lane& leading = lanes_.emplace_back();
      leading.begin = index;
      index += leading_rows[lane];
      leading.end = index;
      leading.ahead = tiles_ahead(rows.subspan(leading.begin, leading_rows[lane]), segment_bytes);
    }
    const std::uint32_t begin = index;
    while (index < rows.size() && rows[index].lane == lane) ++index;
    lanes_.push_back({begin, index, has_leading});
  }
}

void LaneWalk::begin(bool backwards) {
  traversal_.backwards = backwards;
  for (Lane& lane : lanes_) {
    lane.next = lane.begin;
    lane.handed_over = lane.apart = 0;
    lane.tile = 0;
  }
}

bool LaneWalk::is_far_ahead(std::size_t number) const {
  const Lane& lane = lanes_[number];
  return lane.ahead != 0 && lane.tile >= lanes_[number + 1].tile + lane.ahead;
}

bool LaneWalk::waits_for_leading(std::size_t number) const {
  const Lane& lane = lanes_[number];
  if (!lane.follows_leading) return false;
  const Lane& leading = lanes_[number - 1];
  return !leading.has_ended() && leading.tile <= lane.tile;
}

bool LaneWalk::step(Lane& lane) const {
  lane.handed_over = lane.apart = 0;
  if (++lane.next < lane.end) return true;
  if (++lane.tile == tiles_) return false;
  lane.next = lane.begin;
  return true;
}

std::uint64_t LaneWalk::rows_run() const {
  std::uint64_t rows = 0;
  for (const Lane& lane : lanes_) rows += lane.tile * (lane.end - lane.begin) + lane.next;
  return rows;
}

bool LaneWalk::segment_of(const BoundRow& bound, std::uint64_t tile, Range* segment) const {
  *segment = {0, 0};
  if (bound.row->chunk == plan::kToken) return tile + 1 == tiles_;
  const std::uint64_t offset = tile * segment_length_;
  // An empty segment travels, so that ranks compare their operations.
  if (offset >= bound.length) return tile == 0;
  segment->offset = offset;
  if (traversal_.backwards) {
    const std::uint64_t segments = div_ceil(bound.length, segment_length_);
    segment->offset = traversal_.segment(tile, segments) * segment_length_;
  }
  segment->length = std::min(segment_length_, bound.length - segment->offset);
  return true;
}

}  // namespace pycoll::executor
