// Regions: memory that segments leave and arrive in where it lies. Here it is a memfd at addresses
// where this process has nothing, so that whoever touches it by them dies; the fake provider checks
// keys and bounds, and reads and writes it by mappings of its own.
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "tests/cpp/transport/conformance/conformance_world.h"
#include "tests/cpp/transport/verbs/verbs_fixture.h"
#include "transport/verbs/verbs_layout.h"

namespace pycoll::testing {
namespace {

using transport::Link;
using transport::LinkState;
using transport::Passage;
using transport::RecvChannel;
using transport::Region;
using transport::Segment;
using transport::SegmentHeader;
using transport::SendChannel;
using transport::VerbsTransport;
using transport::verbs::Grant;
using transport::verbs::Immediate;
using transport::verbs::Kind;

constexpr std::size_t kBytes = 1 << 20;
constexpr std::uint64_t kAddress = std::uint64_t{0x7f} << 32;  // somewhere in a device
// Of its slots for rank 0, within the region of rank 1.
constexpr std::uint64_t kGranted = 256 << 10;
constexpr std::size_t kStride = 70'000;

// A device's memory: what the test sees of it, and what it exports.
class DeviceBytes {
 public:
  DeviceBytes() : descriptor_(::memfd_create("dmabuf", MFD_CLOEXEC)) {
    CHECK(descriptor_.valid() && ::ftruncate(descriptor_.get(), kBytes) == 0, "no memory");
    void* made = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
    CHECK(made != MAP_FAILED, "no memory");
    bytes_ = static_cast<std::byte*>(made);
  }
  ~DeviceBytes() { ::munmap(bytes_, kBytes); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  std::byte* at(std::uint64_t offset) const { return bytes_ + offset; }
  // As transports name it.
  static const std::byte* name(std::uint64_t offset) {
    return reinterpret_cast<const std::byte*>(kAddress + offset);
  }
  Region region(bool peers_write) const {
    return {kAddress, kBytes, descriptor_.get(), 0, peers_write};
  }

 private:
  UniqueFd descriptor_;
  std::byte* bytes_ = nullptr;
};

void refused(const Status& status, Code code, const std::string& words) {
  CHECK(status.code() == code && status.message().find(words) != std::string::npos, "says: %s",
        status.message().c_str());
}

TEST(a_region_is_registered_at_every_port_until_the_transport_is_closed) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2, kSmallLimits, 2);
  {
    const DeviceBytes memory;
    CHECK(transport->enter({kAddress + 100, 777, memory.region(false).descriptor, 4096 + 100}).ok(),
          "not from within a page");
    refused(transport->enter(memory.region(true)), Code::kInvalidArgument, "there is one already");
  }
  CHECK(fake.registered_bytes() == 2 * 777, "%zu bytes", fake.registered_bytes());
  CHECK(transport->registration_facts().pinned_bytes == 0, "counted as memory of users");
  transport->close();
  CHECK(fake.registered_bytes() == 0, "%zu bytes", fake.registered_bytes());
  refused(transport->enter({kAddress, 1}), Code::kClosed, "was closed");
}

TEST(what_cannot_be_a_region_is_refused_before_any_port_sees_it) {
  FakeVerbs fake({});
  auto transport = make_fake(0, 2);
  const DeviceBytes memory;
  const int descriptor = memory.region(true).descriptor;
  const auto check = [&](const Region& wrong, const char* words) {
    refused(transport->enter(wrong), Code::kInvalidArgument, words);
  };
  check({kAddress + 5, 0, descriptor, 5}, "0 bytes at 5");
  check({kAddress + 4000, 4096, descriptor, ~std::uint64_t{0} - 95}, "an end below 2^64");
  check({~std::uint64_t{0} - 95, 4096}, "an end below 2^64");
  check({kAddress + 9, 16, descriptor, 8}, "the same place within a page of 4096 bytes");
  CHECK(fake.registered_bytes() == 0, "registered");
}

TEST(a_port_or_library_that_cannot_register_it_says_so) {
  FakeVerbs fake({});
  const DeviceBytes memory;
  auto transport = make_fake(0, 2, kSmallLimits, 2);
  fake.refuse_dmabufs(1);
  refused(transport->enter(memory.region(true)), Code::kTransport,
          "fake1 port 1: cannot register 1048576 bytes of a dma-buf: Operation not supported");
  CHECK(fake.registered_bytes() == 0, "the first port kept it");
  std::unique_ptr<VerbsTransport> old;
  const Status opened =
      VerbsTransport::create(0, 2, {FakeVerbs::port(0)}, FakeVerbs::old_api(), kSmallLimits, &old);
  CHECK(opened.ok(), "%s", opened.message().c_str());
  refused(old->enter(memory.region(true)), Code::kTransport, "install rdma-core 34 or newer");
}

// --- segments; rank 0 sends, rank 1 receives

struct World {
  explicit World(int rails, const FakeOptions& options = {.seed = 3})
      : fake(options), ranks(fake_ranks(2, rails)) {
    for (int rank = 0; rank < 2; ++rank) {
      const Status status =
          ranks.at(rank).enter(memory[static_cast<std::size_t>(rank)].region(rank == 1));
      CHECK(status.ok(), "%s", status.message().c_str());
    }
    const Status status = ranks.at(0).accept(1, ranks.at(1).grant(0, kGranted, kBytes - kGranted));
    CHECK(status.ok(), "%s", status.message().c_str());
  }

  Link& link(int rank) { return *ranks.at(rank).link(1 - rank); }
  SendChannel& send() { return link(0).send_channel(3); }
  transport::SendCapabilities can() { return send().capabilities(); }
  RecvChannel& recv() { return link(1).recv_channel(3); }
  void settle(const char* what, const std::function<bool()>& done) {
    const Nanoseconds start = conformance::now();
    while (!done()) {
      CHECK(conformance::now() - start < conformance::kPatience, "waited in vain for %s", what);
      ranks.at(0).poll();
      ranks.at(1).poll();
    }
  }

  FakeVerbs fake;
  std::array<DeviceBytes, 2> memory;
  VerbsRanks ranks;
};

// Segment `number` by one of the four ways, from slot number % 4 to slot number % 4.
bool pass(World& world, std::uint64_t number, std::size_t bytes, unsigned way) {
  const std::uint64_t slot = number % 4 * kStride;
  SegmentHeader header{number, 5, static_cast<std::uint32_t>(bytes), 0};
  Passage passage;
  if ((way & 1) != 0) passage.to = slot;
  if ((way & 2) != 0) {
    if (world.can().sources->reads(DeviceBytes::name(slot), kStride)) return false;
    conformance::fill(world.memory[0].at(slot), bytes, number);
    passage.from = DeviceBytes::name(slot);
    return world.can().regions->pass(header, passage);
  }
  std::byte* slot_buffer = world.send().reserve(bytes);
  if (slot_buffer == nullptr) return false;
  conformance::fill(slot_buffer, bytes, number);
  if (way != 0) return world.can().regions->pass(header, passage);
  world.send().commit(header);
  return true;
}

void take(World& world, std::uint64_t number, std::size_t bytes, unsigned way) {
  const Segment* segment = nullptr;
  world.settle("a segment", [&] { return (segment = world.recv().peek()) != nullptr; });
  CHECK(segment->header.sequence == number && segment->header.bytes == bytes, "another segment");
  CHECK(segment->written_directly == ((way & 1) != 0), "segment %llu",
        static_cast<unsigned long long>(number));
  const std::byte* data = segment->data;
  if (segment->written_directly) {
    CHECK(data == nullptr, "data of a segment that was written directly");
    data = world.memory[1].at(kGranted + number % 4 * kStride);
  }
  CHECK(bytes == 0 || conformance::holds(data, bytes, number), "segment %llu arrived changed",
        static_cast<unsigned long long>(number));
  world.recv().release();
}

TEST(payloads_go_from_and_to_regions_and_slots_in_any_mixture) {
  for (const int rails : {1, 2}) {
    World world(rails);
    Prng prng(static_cast<std::uint64_t>(rails));
    const std::size_t sizes[] = {0, 1, 60, 300, 5000, transport::kSegmentBytesMax};
    std::uint64_t written_directly = 0;
    std::deque<std::pair<std::size_t, unsigned>> under_way;
    std::uint64_t received = 0;
    for (std::uint64_t number = 0; number < 120 || !under_way.empty();) {
      const std::size_t bytes = sizes[prng.below(std::size(sizes))];
      const auto way = static_cast<unsigned>(prng.below(4));
      if (number < 120 && under_way.size() < 4 && prng.chance(3, 4)) {
        if (pass(world, number, bytes, way)) {
          under_way.emplace_back(bytes, way);
          written_directly += (way & 1) != 0 ? bytes : 0;
          ++number;
        } else {
          world.ranks.at(0).poll();
        }
      } else if (!under_way.empty()) {
        take(world, received++, under_way.front().first, under_way.front().second);
        under_way.pop_front();
      }
    }
    world.settle("the region", [&] { return world.send().drained(); });
    CHECK(world.fake.directly_written_bytes() == written_directly,
          "%llu bytes were written directly",
          static_cast<unsigned long long>(world.fake.directly_written_bytes()));
    CHECK(world.fake.sent_from(DeviceBytes::name(0), kBytes) != 0, "all was copied");
  }
}

TEST(memory_of_a_region_is_read_until_the_device_says_that_it_is_not) {
  World world(1);
  world.fake.hold_completions(0, true);
  CHECK(pass(world, 0, 500, 3), "no free slot");
  take(world, 0, 500, 3);
  for (int i = 0; i < 50; ++i) world.ranks.at(0).poll();
  CHECK(world.can().sources->reads(DeviceBytes::name(0), 500), "it may be overwritten");
  CHECK(!world.can().sources->reads(DeviceBytes::name(500), 500), "nobody reads that");
  world.fake.hold_completions(0, false);
  world.settle("its end", [&] { return !world.can().sources->reads(DeviceBytes::name(0), 500); });
}

TEST(a_direct_write_without_a_grant_loses_the_link) {
  FakeVerbs fake({});
  VerbsRanks ranks = fake_ranks(2, 1);
  const Immediate segment{Kind::kSegment, 3, 0};
  const Immediate direct{Kind::kWrittenDirectly, 3, 0};
  fake.rewrite(segment.bits(), direct.bits());
  SendChannel& send = ranks.at(0).link(1)->send_channel(3);
  CHECK(send.reserve(8) != nullptr, "no free slot");
  send.commit({1, 5, 8, 0});
  Link& link = *ranks.at(1).link(0);
  const Nanoseconds start = conformance::now();
  while (link.state() == LinkState::kOpen) {
    CHECK(conformance::now() - start < conformance::kPatience, "it is not lost");
    ranks.at(0).poll();
    ranks.at(1).poll();
  }
  CHECK(link.reason().find("a payload was placed where nothing is granted") != std::string::npos,
        "%s", link.reason().c_str());
}

// The message says that its payload came before it, but the payload is in it.
TEST(a_payload_next_to_its_header_is_no_direct_write) {
  World world(1);
  const Immediate segment{Kind::kSegment, 3, 0};
  const Immediate direct{Kind::kWrittenDirectly, 3, 0};
  world.fake.rewrite(segment.bits(), direct.bits());
  CHECK(pass(world, 0, 8, 0), "no free slot");
  world.settle("the loss", [&] { return world.link(1).state() == LinkState::kLost; });
  CHECK(world.link(1).reason().find("a message of 40 bytes says 8 bytes") != std::string::npos,
        "%s", world.link(1).reason().c_str());
}

TEST(what_is_no_grant_is_refused) {
  World world(1);
  const std::string good = world.ranks.at(1).grant(0, 0, 4096);
  std::string older = good;
  older[6] = 0;
  for (const std::string& wrong : {std::string(), good.substr(1), good + "x", older}) {
    refused(world.ranks.at(0).accept(1, wrong), Code::kInvalidArgument,
            "are no grant of this pycoll ver");
  }
}

// The end of a part is an address too: whoever adds offset and bytes later must not wrap.
TEST(a_grant_that_ends_beyond_all_addresses_is_refused) {
  constexpr std::uint64_t kMost = ~std::uint64_t{0};
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  const std::pair<std::uint64_t, std::uint64_t> parts[] = {
      {kMost, 2}, {8, kMost}, {kMost, kMost}, {kHalf, kHalf}, {4096, 0}};
  World world(1);
  for (const auto& [address, bytes] : parts) {
    Grant grant;
    grant.address = address;
    grant.bytes = bytes;
    const std::string wrong(reinterpret_cast<const char*>(&grant), sizeof(grant));
    refused(world.ranks.at(0).accept(1, wrong), Code::kInvalidArgument,
            "are no grant of this pycoll ver");
  }
}

// A region ends with its transport, whatever is still to be read from it.
TEST(a_region_may_be_freed_once_its_transport_is_closed) {
  for (const bool answers : {true, false}) {
    World world(1);
    if (!answers) world.fake.cut(1);
    for (std::uint64_t number = 0; number < 4; ++number) CHECK(pass(world, number, 3000, 3), "?");
    world.ranks.at(0).close();
    std::memset(world.memory[0].at(0), 0xee, kBytes);
    if (!answers) continue;
    for (std::uint64_t number = 0; number < 4; ++number) take(world, number, 3000, 3);
    world.settle("the end", [&] { return world.link(1).state() == LinkState::kClosed; });
  }
}

}  // namespace
}  // namespace pycoll::testing

RUN_TESTS()
