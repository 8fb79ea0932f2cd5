// Validates plan bytes before an engine runs them. The engines execute a validated plan without
// further checks of indices, slots or counts. Validation does not prove that a plan computes its
// collective, nor that the plans of different ranks fit together; pycoll/schedule/proof.py proves
// the schedule, and pycoll/plan/verifier.py that the plans fit together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "plan/plan.h"

namespace pycoll::plan {

// Bounds on the memory and time that a plan may use; part of FORMAT.md.
inline constexpr std::uint32_t kSizeMax = 0x7fffffff;  // ranks are ints
inline constexpr std::uint32_t kRowsMax = 1U << 24;
inline constexpr std::uint32_t kScratchSlotsMax = 1U << 16;
inline constexpr std::uint32_t kChannelEntriesMax = 65534;
inline constexpr std::uint32_t kChannelNumberMax = 6;

// Checks every rule of FORMAT.md. On success *plan views `bytes`, which must outlive it. Otherwise
// *plan is unchanged and the status (kInvalidArgument) names the first violation: table, row
// number, field, value, bound. Requires: `bytes` aligned to 4. The function checks the alignment
// too, so that a plan inside a larger message is refused and not misread. Any thread.
Status validate(std::span<const std::byte> bytes, Plan* plan);

}  // namespace pycoll::plan
