// The order in which an operation goes through the segments of a chunk.
//
// Every second operation of several tiles runs backward, if its plan alternates. The segments that
// the operation before it touched last, or that a caller wrote last, are still in this core's
// caches. If the memory is longer than the caches, a fixed order would reach each segment just
// after it was evicted.
#pragma once

#include <cstdint>

namespace pycoll::executor {

struct Traversal {
  bool backwards = false;  // counted alike on all ranks, see ChannelSource::traversals

  // The number of the segment that tile `tile` holds, of a chunk with `segments` segments. A
  // backward traversal reverses the order of pairs of segments, not the order within a pair. So a
  // split between sender and receiver (CopyStrategy::kSplit) begins with the same side in both
  // orders. Requires: tile < segments.
  std::uint64_t segment(std::uint64_t tile, std::uint64_t segments) const {
    if (!backwards) return tile;
    const std::uint64_t odd = segments % 2;
    if (tile < odd) return segments - 1;
    const std::uint64_t behind = tile - odd;
    return segments - odd - 2 - behind / 2 * 2 + behind % 2;
  }
};

}  // namespace pycoll::executor
