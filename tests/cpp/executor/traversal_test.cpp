// An operation comes by every segment once, forwards or in pairs from the end.
#include "executor/traversal.h"

#include <vector>

#include "tests/cpp/support/check.h"

using pycoll::executor::Traversal;

TEST(every_segment_is_in_one_tile) {
  for (const bool backwards : {false, true}) {
    const Traversal traversal{backwards};
    for (std::uint64_t segments = 1; segments <= 33; ++segments) {
      std::vector<bool> seen(segments, false);
      for (std::uint64_t tile = 0; tile < segments; ++tile) {
        const std::uint64_t segment = traversal.segment(tile, segments);
        CHECK(segment < segments && !seen[segment], "tile %d of %d: segment %d",
              static_cast<int>(tile), static_cast<int>(segments), static_cast<int>(segment));
        seen[segment] = true;
      }
    }
  }
}

TEST(backwards_pairs_come_from_the_end_and_are_what_they_were) {
  const auto order = [](std::uint64_t segments) {
    std::vector<std::uint64_t> all;
    for (std::uint64_t tile = 0; tile < segments; ++tile) {
      all.push_back(Traversal{true}.segment(tile, segments));
    }
    return all;
  };
  CHECK(order(1) == std::vector<std::uint64_t>({0}), "1");
  CHECK(order(2) == std::vector<std::uint64_t>({0, 1}), "2");
  CHECK(order(5) == std::vector<std::uint64_t>({4, 2, 3, 0, 1}), "5");
  CHECK(order(6) == std::vector<std::uint64_t>({4, 5, 2, 3, 0, 1}), "6");
}

RUN_TESTS()
