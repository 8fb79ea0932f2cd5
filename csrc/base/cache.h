// Sizes of the processor's caches.
#pragma once

#include <cstddef>

namespace pycoll {

// Bytes of the second-level cache of the first core, or a typical size if the system does not
// report it. Any thread.
std::size_t core_cache_bytes();
// Bytes of the third-level cache, which cores share; 0 if there is none or the system does not
// report it. Any thread.
std::size_t shared_cache_bytes();

}  // namespace pycoll
