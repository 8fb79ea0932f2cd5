// The cores on which the calling thread runs and may run.
#pragma once

#include <vector>

namespace pycoll {

// Number of cores on which the calling thread may run; at least 1.
int usable_cores();
// The numbers of these cores, ascending; empty if the system does not report them.
std::vector<int> usable_core_numbers();
// The core on which the calling thread last ran; -1 if the system does not report it.
int current_core();
// Moves the calling thread to `core`, then restores its affinity mask, so that the scheduler may
// move it again at any time. Changes that others make to the mask during the call are lost. Does
// nothing if the thread may not run on `core`.
void move_to_core(int core);
// Whether the calling thread may set its affinity mask, and finds it as it was set. Sets the mask
// that it has, so nothing changes.
bool can_move();

}  // namespace pycoll
