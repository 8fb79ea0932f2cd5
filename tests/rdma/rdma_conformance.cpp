// The transport contract over real devices: rank r uses the device PREFIXr of those given.
//
//   rdma_conformance PREFIX DEVICES GID_INDEX      for example: rdma_conformance rxe 2 1
#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "conformance_world.h"
#include "transport_conformance.h"
#include "verbs_fixture.h"

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

const Conformance suite({"", true, [](int size, std::uint64_t) {
                           return std::make_unique<DeviceFixture>(size);
                         }});

// Pages of this process, named by their address: Soft-RoCE registers no dma-buf.
struct Pages {
  static constexpr std::size_t kBytes = 1 << 20;
  std::byte* memory = static_cast<std::byte*>(
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ~Pages() { ::munmap(memory, kBytes); }
  transport::Region region() const {
    return {reinterpret_cast<std::uint64_t>(memory), kBytes, -1, 0, true};
  }
};

// Rank 0 sends; the four ways in turns, of which the second bit leaves the region and the first
// arrives there.
TEST(payloads_go_from_and_to_regions_and_rooms) {
  constexpr std::size_t kGranted = 4096;
  constexpr std::size_t kSizes[] = {0, 1, 300, 5000, transport::kSegmentBytesMax};
  const Pages pages[2];
  testing::VerbsRanks ranks(2, [](int rank) { return open_rank(rank, 2); });
  for (int rank = 0; rank < 2; ++rank) CHECK(ranks.at(rank).enter(pages[rank].region()).ok(), "?");
  transport::Link& near = *ranks.at(0).link(1);
  transport::Link& far = *ranks.at(1).link(0);
  CHECK(near.accept(far.grant(kGranted, Pages::kBytes - kGranted)).ok(), "no grant");
  transport::SendChannel& send = near.send_channel(2);
  transport::RecvChannel& recv = far.recv_channel(2);
  const auto settle = [&](const auto& done) {
    for (const Nanoseconds start = now(); !done();) {
      CHECK(now() - start < kPatience, "waited in vain");
      ranks.at(0).poll();
      ranks.at(1).poll();
    }
  };
  for (std::uint64_t number = 0; number < 4 * std::size(kSizes); ++number) {
    const std::size_t bytes = kSizes[number / 4];
    const transport::SegmentHeader header = header_for(7, number, bytes);
    transport::Passage way;
    if ((number & 1) != 0) way.to = 128 * number;
    if ((number & 2) != 0) way.from = pages[0].memory + 64 * number;
    std::byte* room = (number & 2) != 0 ? pages[0].memory + 64 * number : nullptr;
    settle([&] { return room != nullptr || (room = send.reserve(bytes)) != nullptr; });
    fill(room, bytes, number);
    settle([&] { return send.pass(header, way); });
    const transport::Segment* segment = nullptr;
    settle([&] { return (segment = recv.peek()) != nullptr; });
    CHECK(segment->header == header && segment->placed == ((number & 1) != 0), "segment %llu",
          static_cast<unsigned long long>(number));
    const std::byte* data = segment->placed ? pages[1].memory + kGranted + way.to : segment->data;
    CHECK(bytes == 0 || holds(data, bytes, number), "%zu bytes arrived changed", bytes);
    recv.release();
    settle([&] { return !send.reads(pages[0].memory, Pages::kBytes); });
  }
}

}  // namespace
}  // namespace pycoll::conformance

int main(int count, char** words) {
  if (count != 4) return 2;
  pycoll::conformance::prefix = words[1];
  pycoll::conformance::devices = std::atoi(words[2]);
  pycoll::conformance::gid_index = std::atoi(words[3]);
  return pycoll::testing::run_all();
}
