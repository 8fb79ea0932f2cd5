// The blocks of a collective and the ranks whose buffers hold them: the table in FORMAT.md,
// "Chunks", as code. Validation, binding and printing use only these functions. Pure functions, any
// thread.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "plan/plan.h"

namespace pycoll::plan {

// Whether the collective combines values; other collectives only move them.
bool reduces(Collective collective);
// Whether the collective has a root.
bool has_root(Collective collective);

// Number of blocks of the collective among `size` ranks. size * size does not overflow the result.
std::uint64_t block_count(Collective collective, std::uint32_t size);

// Number of ranks that contribute and receive: all but the servers. Requires: servers < size.
std::uint32_t workers(const Header& header);

// Whether the plan's rank holds `block` in its input (output). A buffer holds its blocks densely,
// in ascending order. Requires: a valid header (collective, size, servers, rank, root),
// block < block_count.
bool holds_input(const Header& header, std::uint32_t block);
bool holds_output(const Header& header, std::uint32_t block);

// Group number of a block. The blocks of one group lie densely in the outputs of the same ranks;
// the outputs of different groups have no rank in common. The result is below max(1, size).
// Requires: as above.
std::uint32_t output_group(const Header& header, std::uint32_t block);

}  // namespace pycoll::plan
