// Prints plans as text for people.
#pragma once

#include <string>

#include "plan/plan.h"

namespace pycoll::plan {

// Returns a title line, then one line per row. "recv" and "send" name peers; "3#1" is channel 1 of
// rank 3, where the channel's number differs from the lane's. "in" and "out" are input and output
// (by chunk), "tmp" is scratch (by slot):
//
//   all_reduce, rank 1 of 4, 4 chunks, 1 lane, 0 scratch slots
//   lane 0: chunk 2: recv 0 + in[2] -> out[2], send 2 (final)
//
// Requires: a plan that validate() accepted. Any thread.
std::string to_text(const Plan& plan);

}  // namespace pycoll::plan
