// The leading rows of each lane, which an engine may run ahead of the other rows (FORMAT.md). Pure,
// any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace pycoll::plan {

// Number of leading rows by lane; 0 if no row follows them, or if a later row uses one of their
// channels. Requires: a validated plan.
std::vector<std::uint32_t> count_leading_rows(const Plan& plan);

}  // namespace pycoll::plan
