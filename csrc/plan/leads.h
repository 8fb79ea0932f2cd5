// The rows with which lanes begin and that may run ahead of the others ("Leads" in FORMAT.md).
// Pure, any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace pycoll::plan {

// By lane: how many rows lead it; none where all of its rows would.
// Requires: a validated plan.
std::vector<std::uint32_t> leads_of(const Plan& plan);

}  // namespace pycoll::plan
