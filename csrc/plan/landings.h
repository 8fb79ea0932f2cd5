// What of a plan may land (`land` in FORMAT.md), and how the two ends of a channel name it: by its
// place among the channel's uses in a tile, which are the same at both ends. Pure, any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace pycoll::plan {

struct Landings {
  // By channel of the plan, none where it sends: bit u tells that what comes as use u may land.
  std::vector<std::uint64_t> offered;
  // Of row r's i-th send channel at [r * kSendMax + i]: which use it is; kOfferedUses for later
  // ones and for none.
  std::vector<std::uint8_t> uses;

  std::uint8_t use(std::size_t row, int send) const { return uses[row * kSendMax + send]; }
};

// Requires: a validated plan.
Landings landings_of(const Plan& plan);

}  // namespace pycoll::plan
