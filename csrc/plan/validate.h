// The gate between plan bytes and the engines: what passes here can be executed without any further
// check of an index, a slot or a count. It does not prove that a plan computes its collective, nor
// that the ranks' plans fit together; pycoll/verify.py does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "plan/plan.h"

namespace pycoll::plan {

// Bounds on what a plan may ask of memory and time; part of FORMAT.md.
inline constexpr std::uint32_t kSizeMax = 0x7fffffff;  // ranks are ints
inline constexpr std::uint32_t kRowsMax = 1U << 24;
inline constexpr std::uint32_t kScratchSlotsMax = 1U << 16;
inline constexpr std::uint32_t kChannelEntriesMax = 65534;
inline constexpr std::uint32_t kChannelNumberMax = 6;

// Checks every rule of FORMAT.md. On success *plan views `bytes`, which must outlive it; otherwise
// *plan is untouched and the status (kInvalidArgument) names the first violation: table, row
// number, field, value, bound. Requires: `bytes` aligned to 4, which is checked too, so that a plan
// taken from the middle of a message is refused and not misread. Any thread.
Status validate(std::span<const std::byte> bytes, Plan* plan);

}  // namespace pycoll::plan
