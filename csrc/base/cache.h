// What the processor keeps near.
#pragma once

#include <cstddef>

namespace pycoll {

// Bytes of the second level of cache that the first core has; a usual size where the system does
// not tell. Any thread.
std::size_t core_cache_bytes();

}  // namespace pycoll
