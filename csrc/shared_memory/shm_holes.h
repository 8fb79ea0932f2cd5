// The free ranges of offsets in an arena.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>

namespace pycoll::transport::shm {

struct Hole {
  std::size_t offset = 0;
  std::size_t length = 0;
};

// Holes never touch each other. One thread at a time. Every call takes logarithmic time in the
// number of holes, except take() with an alignment larger than the smallest length in use.
class Holes {
 public:
  void reset(Hole whole);

  // Takes `length` from the shortest hole that is long enough; of equal holes, from the first one.
  // Sets `offset` to a multiple of `alignment`. False if no hole is long enough.
  [[nodiscard]] bool take(std::size_t length, std::size_t alignment, std::size_t* offset);
  // Adds a range and joins it with its neighbours. Returns the hole that now contains it.
  Hole give(Hole given);

 private:
  void put(Hole hole);
  void drop(Hole hole);

  std::map<std::size_t, std::size_t> by_offset_;             // offset to length
  std::set<std::pair<std::size_t, std::size_t>> by_length_;  // (length, offset)
};

}  // namespace pycoll::transport::shm
