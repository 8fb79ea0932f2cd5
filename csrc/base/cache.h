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
// The size from which copies bypass the caches. What `ranks` ranks that share the cache have in so
// many bytes each is evicted before its next use, even if it is written through the caches. The
// bound is several times a core's own caches, and more than a rank's share of a part of the shared
// cache. Any thread.
std::size_t uncached_bytes(std::size_t ranks);

}  // namespace pycoll
