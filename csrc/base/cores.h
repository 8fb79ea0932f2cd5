// What the calling thread runs on, and what it may.
#pragma once

#include <vector>

namespace pycoll {

// How many cores the calling thread may run on; at least 1.
int usable_cores();
// Their numbers, ascending; none if the system does not say.
std::vector<int> usable_core_numbers();
// The core that the calling thread ran on a moment ago; -1 if the system does not say.
int current_core();
// Takes the calling thread to `core`, from where the scheduler may take it anywhere it might
// before: what the thread may run on is afterwards what it was, but for changes by others in
// between (some tens of microseconds). Does nothing if the thread may not run there.
void move_to_core(int core);

}  // namespace pycoll
