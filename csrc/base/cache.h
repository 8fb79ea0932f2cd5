// What the processor keeps near.
#pragma once

#include <cstddef>

namespace pycoll {

// Any thread. Bytes of the second level of cache that the first core has; a usual size where the
// system does not tell.
std::size_t core_cache_bytes();
// Of the last level, which cores share; 0 where there is none, or the system does not tell.
std::size_t shared_cache_bytes();

}  // namespace pycoll
