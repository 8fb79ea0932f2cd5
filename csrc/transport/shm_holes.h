// What is free of an arena: ranges of offsets.
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

// Holes that do not touch each other. One thread at a time. All takes time by the logarithm of
// their number, save for alignments beyond the shortest length that is given and taken.
class Holes {
 public:
  void reset(Hole whole);

  // From the shortest hole with room, of several the foremost: its beginning, at a multiple of
  // `alignment`. False if none has room.
  [[nodiscard]] bool take(std::size_t length, std::size_t alignment, std::size_t* offset);
  // Joined with its neighbours: what it is now a part of.
  Hole give(Hole given);

 private:
  void put(Hole hole);
  void drop(Hole hole);

  std::map<std::size_t, std::size_t> by_offset_;             // to length
  std::set<std::pair<std::size_t, std::size_t>> by_length_;  // with offset
};

}  // namespace pycoll::transport::shm
