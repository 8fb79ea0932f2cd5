// The conformance suite over the simulated network: once plain, and for several seeds with a random
// subset of its awkward features.

#include <cstdint>
#include <cstdio>

#include "transport/sim.h"
#include "transport_conformance.h"

namespace pycoll::conformance {
namespace {

// Swarm 0 is the plain network; the others draw their features from swarm and the case's seed.
template <std::uint64_t kSwarm>
class SimFixture {
 public:
  static constexpr bool kThreads = false;

  SimFixture(int size, std::uint64_t seed) : network_(options(size, seed)) {
    std::printf("  %s\n", transport::to_text(network_.options()).c_str());  // to repeat a failure
  }

  Transport& at(int rank) { return *network_.transport(rank); }
  void idle() { network_.advance(); }
  void kill(int rank) { network_.kill(rank); }

 private:
  static transport::SimOptions options(int size, std::uint64_t seed) {
    transport::SimOptions plain;
    plain.size = size;
    plain.seed = seed;
    if (kSwarm == 0) return plain;
    return transport::SimOptions::swarm(size, seed ^ (kSwarm << 32));
  }

  transport::SimNetwork network_;
};

[[maybe_unused]] const bool registered =
    register_cases<SimFixture<0>>() && register_cases<SimFixture<1>>() &&
    register_cases<SimFixture<2>>() && register_cases<SimFixture<3>>() &&
    register_cases<SimFixture<4>>() && register_cases<SimFixture<5>>();

}  // namespace
}  // namespace pycoll::conformance

RUN_TESTS()
