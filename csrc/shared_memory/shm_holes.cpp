#include "shared_memory/shm_holes.h"

#include <iterator>

#include "base/bytes.h"

namespace pycoll::transport::shm {

void Holes::reset(Hole whole) {
  by_offset_.clear();
  by_length_.clear();
  put(whole);
}

bool Holes::take(std::size_t length, std::size_t alignment, std::size_t* offset) {
  for (auto found = by_length_.lower_bound({length, 0}); found != by_length_.end(); ++found) {
    const Hole hole{found->second, found->first};
    *offset = round_up(hole.offset, alignment);
    const std::size_t skipped = *offset - hole.offset;
    if (hole.length - length < skipped) continue;
    drop(hole);
    if (skipped != 0) put({hole.offset, skipped});
    const std::size_t left = hole.length - length - skipped;
    if (left != 0) put({*offset + length, left});
    return true;
  }
  return false;
}

Hole Holes::give(Hole given) {
  const auto behind = by_offset_.find(given.offset + given.length);
  if (behind != by_offset_.end()) {
    given.length += behind->second;
    drop({behind->first, behind->second});
  }
  const auto next = by_offset_.lower_bound(given.offset);
  if (next != by_offset_.begin()) {
    const Hole before{std::prev(next)->first, std::prev(next)->second};
    if (before.offset + before.length == given.offset) {
      drop(before);
      given = {before.offset, before.length + given.length};
    }
  }
  put(given);
  return given;
}

void Holes::put(Hole hole) {
  by_offset_.emplace(hole.offset, hole.length);
  by_length_.emplace(hole.length, hole.offset);
}

void Holes::drop(Hole hole) {
  by_offset_.erase(hole.offset);
  by_length_.erase({hole.length, hole.offset});
}

}  // namespace pycoll::transport::shm
