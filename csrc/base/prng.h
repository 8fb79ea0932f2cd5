// SplitMix64 for tests and the simulator. It computes with integers only, so a seed gives the same
// numbers on every machine.
#pragma once

#include <cstdint>

namespace pycoll {

class Prng {
 public:
  explicit Prng(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }

  // A number in [0, bound), uniform enough for tests. Requires: bound > 0.
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

  // True with probability numerator / denominator.
  bool chance(std::uint64_t numerator, std::uint64_t denominator) {
    return below(denominator) < numerator;
  }

 private:
  std::uint64_t state_;
};

}  // namespace pycoll
