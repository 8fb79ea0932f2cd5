// Holes give what fits best, never the same twice, and grow together again.
#include "shared_memory/shm_holes.h"

#include <algorithm>
#include <random>
#include <vector>

#include "tests/cpp/support/check.h"

using pycoll::transport::shm::Hole;
using pycoll::transport::shm::Holes;

namespace {

constexpr std::size_t kWhole = 4096;

// What is free, place by place, for comparison.
class Places {
 public:
  void set(Hole part, bool free) {
    for (std::size_t at = part.offset; at < part.offset + part.length; ++at) {
      CHECK(free_[at] != free, "place %zu is so already", at);
      free_[at] = free;
    }
  }
  std::vector<Hole> holes() const {
    std::vector<Hole> found;
    for (std::size_t at = 0; at < kWhole; ++at) {
      if (!free_[at]) continue;
      if (at == 0 || !free_[at - 1]) found.push_back({at, 0});
      ++found.back().length;
    }
    return found;
  }

 private:
  std::vector<bool> free_ = std::vector<bool>(kWhole, true);
};

std::size_t aligned(std::size_t offset, std::size_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

// Where it fits in the shortest hole that holds it, the foremost of equals; kWhole if none does.
std::size_t best(const std::vector<Hole>& holes, std::size_t length, std::size_t alignment) {
  Hole found{kWhole, kWhole + 1};
  for (const Hole& hole : holes) {
    const std::size_t end = aligned(hole.offset, alignment) + length;
    if (end <= hole.offset + hole.length && hole.length < found.length) found = hole;
  }
  return found.offset == kWhole ? kWhole : aligned(found.offset, alignment);
}

}  // namespace

TEST(what_is_given_is_what_fits_best_and_comes_back_whole) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    Holes holes;
    Places places;
    std::vector<Hole> taken;
    holes.reset({0, kWhole});
    for (int step = 0; step < 400; ++step) {
      if (taken.empty() || random() % 5 < 3) {
        const std::size_t length = 1 + random() % (random() % 8 == 0 ? 900 : 60);
        const std::size_t alignment = random() % 4 == 0 ? 64 : 1;
        std::size_t offset = kWhole;
        const bool any = holes.take(length, alignment, &offset);
        const std::size_t expected = best(places.holes(), length, alignment);
        CHECK(any == (expected != kWhole) && (!any || offset == expected),
              "seed %u step %d: %zu places at %zu, not %zu", seed, step, length, offset, expected);
        if (!any) continue;
        taken.push_back({offset, length});
        places.set(taken.back(), false);
      } else {
        std::swap(taken[random() % taken.size()], taken.back());
        const Hole given = taken.back();
        taken.pop_back();
        places.set(given, true);
        const Hole now = holes.give(given);
        const auto all = places.holes();
        CHECK(std::any_of(all.begin(), all.end(),
                          [&](const Hole& hole) {
                            return hole.offset == now.offset && hole.length == now.length;
                          }),
              "seed %u step %d: [%zu, +%zu) is no hole", seed, step, now.offset, now.length);
      }
    }
    for (const Hole& given : taken) holes.give(given);
    std::size_t offset = 1;
    CHECK(holes.take(kWhole, 1, &offset) && offset == 0, "seed %u: in pieces", seed);
    CHECK(!holes.take(1, 1, &offset), "seed %u: there is more", seed);
  }
}

RUN_TESTS()
