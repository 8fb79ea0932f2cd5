// The conformance suite over the simulated network: once plain, and for several seeds with a random
// subset of its awkward features.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "tests/cpp/transport/conformance/transport_conformance.h"
#include "transport/sim/sim.h"

namespace pycoll::conformance {
namespace {

// Swarm 0 is the plain network; the others draw their features from swarm and the case's seed.
class SimFixture : public Fixture {
 public:
  SimFixture(std::uint64_t swarm, int size, std::uint64_t seed)
      : network_(options(swarm, size, seed)) {
    std::printf("  %s\n", transport::to_text(network_.options()).c_str());  // to repeat a failure
  }

  transport::Transport& at(int rank) override { return *network_.transport(rank); }
  void idle() override { network_.advance(); }
  void kill(int rank) override { network_.kill(rank); }

 private:
  static transport::SimOptions options(std::uint64_t swarm, int size, std::uint64_t seed) {
    transport::SimOptions plain;
    plain.size = size;
    plain.seed = seed;
    if (swarm == 0) return plain;
    return transport::SimOptions::swarm(size, seed ^ (swarm << 32));
  }

  transport::SimNetwork network_;
};

struct Swarms {
  Swarms() {
    for (std::uint64_t swarm = 0; swarm < 6; ++swarm) {
      Conformance(
          {"swarm " + std::to_string(swarm) + ": ", false, [swarm](int size, std::uint64_t seed) {
             return std::make_unique<SimFixture>(swarm, size, seed);
           }});
    }
  }
};
const Swarms swarms;

}  // namespace
}  // namespace pycoll::conformance

RUN_TESTS()
