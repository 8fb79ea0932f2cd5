// Plans for human eyes.
#pragma once

#include <string>

#include "plan/plan.h"

namespace pycoll::plan {

// A title line, then one line per row. recv and send name peers; "3#1" is channel 1 of rank 3 where
// the channel's number is not the lane's. in, out and tmp are input, output (by chunk) and scratch
// (by slot):
//
//   all_reduce, rank 1 of 4, 4 chunks, 1 lane, 0 scratch slots
//   lane 0: chunk 2: recv 0 + in[2] -> out[2], send 2 (final)
//
// Requires: a plan that validate() passed. Any thread.
std::string to_text(const Plan& plan);

}  // namespace pycoll::plan
