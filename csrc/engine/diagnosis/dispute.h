// The search of ranks that disagree for the first array in which their calls differ. The ranks
// compare digests of ever fewer arrays, in rounds. A rank enters a round when all others have told
// their digests of the round before, so its notice holds one round at a time.
#pragma once

#include <vector>

#include "executor/call_arrays.h"
#include "transport/transport.h"

namespace pycoll::engine {

// The first state of a rank: nothing compared, one digest of all its arrays. `arrays` may be
// nullptr.
transport::Dispute open_dispute(std::uint64_t operation, const executor::CallArrays* arrays);

// The next round, from the states of all ranks in one round. All ranks compute the same from the
// same states. Only `round`, `begin` and `width` of the result count. Requires: one state or more.
transport::Dispute next_round(const std::vector<transport::Dispute>& all);

// Whether both are of the same round, and describe the same arrays.
bool in_step(const transport::Dispute& one, const transport::Dispute& other);

// Whether all ranks have ended the search without a difference.
bool found_equal(const transport::Dispute& dispute);

// Moves a rank to the round of `to`, with its own digests.
void enter_round(const transport::Dispute& to, const executor::CallArrays* arrays,
                 transport::Dispute* dispute);

// The end of a search that finds nothing to compare.
transport::Dispute end_search(const transport::Dispute& dispute);

}  // namespace pycoll::engine
