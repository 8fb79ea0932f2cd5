// The segments of a plan that a sender may write directly into the receiver's output
// (`direct_write` in FORMAT.md). Both ends of a channel name such a segment by its use: its index
// among the segments that the channel carries in one tile. Uses are numbered alike at both ends.
// Pure, any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace pycoll::plan {

struct DirectWrites {
  // By channel of the plan, 0 for send channels: bit u is set if use u may be a direct write.
  std::vector<std::uint64_t> window_uses;
  // By channel: whether a row that receives on it announces its window (kFlagAnnounceWindow).
  std::vector<bool> announced;
  // The use of row r's i-th send channel, at [r * kSendMax + i]. kWindowUses for a later use and
  // for a row without that channel.
  std::vector<std::uint8_t> uses;

  std::uint8_t use(std::size_t row, int send) const { return uses[row * kSendMax + send]; }
};

// Requires: a validated plan.
DirectWrites direct_writes_of(const Plan& plan);

}  // namespace pycoll::plan
