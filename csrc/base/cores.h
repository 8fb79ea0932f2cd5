// What this process may run on.
#pragma once

namespace pycoll {

// How many cores the calling thread may run on; at least 1.
int usable_cores();

}  // namespace pycoll
