// Which blocks a collective has and which rank's buffers hold them: the table in FORMAT.md,
// "Chunks", in code. Validation, binding and printing ask here and nowhere else. Pure functions,
// any thread.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "plan/plan.h"

namespace pycoll::plan {

// Whether values are combined; the others only move them.
bool reduces(Collective collective);
// Whether one rank plays a special part.
bool rooted(Collective collective);

// Blocks of the collective among `size` ranks; size * size never overflows the result.
std::uint64_t block_count(Collective collective, std::uint32_t size);

// Whether `block` lies in the input (output) of the plan's rank. A buffer holds its blocks densely,
// in ascending order. Requires: a valid header (collective, size, rank, root), block < block_count.
bool holds_input(const Header& header, std::uint32_t block);
bool holds_output(const Header& header, std::uint32_t block);

// Blocks of one number lie in the outputs of the same ranks, densely; those of different numbers
// have no rank in common. Below max(1, size). Requires: as above.
std::uint32_t output_group(const Header& header, std::uint32_t block);

}  // namespace pycoll::plan
