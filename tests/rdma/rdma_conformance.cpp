// The transport contract over real devices: rank r uses the device PREFIXr of those given.
//
//   rdma_conformance PREFIX DEVICES GID_INDEX      for example: rdma_conformance rxe 2 1
#include <cstdlib>
#include <memory>
#include <string>

#include "tests/cpp/transport/conformance/transport_conformance.h"
#include "tests/cpp/transport/verbs/verbs_fixture.h"

namespace pycoll::conformance {
namespace {

using transport::VerbsPort;
using transport::VerbsTransport;

std::string prefix;
int devices = 0;
int gid_index = 0;

std::unique_ptr<VerbsTransport> open_rank(int rank, int size) {
  std::unique_ptr<VerbsTransport> made;
  const VerbsPort port{prefix + std::to_string(rank % devices), 1, gid_index};
  const Status status = VerbsTransport::create(rank, size, {port}, &made);
  CHECK(status.ok(), "%s", status.message().c_str());
  return made;
}

class DeviceFixture : public Fixture {
 public:
  explicit DeviceFixture(int size)
      : ranks_(size, [size](int rank) { return open_rank(rank, size); }) {}

  transport::Transport& at(int rank) override { return ranks_.at(rank); }
  void kill(int rank) override { ranks_.kill(rank); }
  std::uint64_t depth() const override { return transport::verbs::kVerbsDepth; }

 private:
  testing::VerbsRanks ranks_;
};

const Conformance suite(
    {"", true, [](int size, std::uint64_t) { return std::make_unique<DeviceFixture>(size); },
     testing::kVerbsAbilities});

}  // namespace
}  // namespace pycoll::conformance

int main(int count, char** words) {
  if (count != 4) return 2;
  pycoll::conformance::prefix = words[1];
  pycoll::conformance::devices = std::atoi(words[2]);
  pycoll::conformance::gid_index = std::atoi(words[3]);
  return pycoll::testing::run_all();
}
