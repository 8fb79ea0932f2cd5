// What the processor keeps near.
#pragma once

#include <cstddef>

namespace pycoll {

// Bytes of the third level of cache that the first core has, shared with others or not; a usual
// size where the system does not tell. Any thread.
std::size_t cache_bytes();

}  // namespace pycoll
