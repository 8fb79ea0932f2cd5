// The host proxy at moments that threads seldom meet: its wire is made up, and calls the test.

#include "device/host_proxy/proxy.h"

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "device/kernels/protocols.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using namespace std::chrono_literals;

struct Counting final : transport::SendChannel {
  std::byte* reserve(std::size_t) override { return space.data(); }
  void commit(const transport::SegmentHeader&) override { ++sent; }
  bool hand_over(const transport::SegmentHeader&, const std::byte*) override { return false; }
  bool drained() override { return true; }

  std::vector<std::byte> space = std::vector<std::byte>(1 << 20);
  int sent = 0;
};

struct Silent final : transport::RecvChannel {
  const transport::Segment* peek() override { return nullptr; }
  void release() override {}
};

// A link that is open, over which nothing comes.
struct Wire final : transport::Transport, transport::Link {
  std::string_view name() const override { return "made up"; }
  transport::Link* link(int) override { return this; }
  bool poll() override { return false; }
  bool arm() override { return false; }
  void disarm() override {}
  int event_fd() const override { return -1; }
  bool has_new_notices() override { return false; }
  void let_go(transport::LetGo) override {}
  void close() override {}

  transport::SendChannel& send_channel(std::uint32_t) override { return sending; }
  transport::RecvChannel& recv_channel(std::uint32_t) override { return receiving; }
  void post(const transport::Notice&) override {}
  transport::Notice newest() override { return {}; }
  transport::LinkState state() override {
    on_look(++looks);
    return transport::LinkState::kOpen;
  }
  std::string reason() const override { return {}; }

  Counting sending;
  Silent receiving;
  int looks = 0;  // of the proxy's thread
  std::function<void(int)> on_look = [](int) {};
};

// A kernel writes when the proxy has just looked for what kernels wrote, its rank sees that the
// kernel has ended, and leaves.
TEST(what_kernels_wrote_before_a_rank_leaves_is_sent) {
  for (int look = 1; look <= 9; ++look) {
    const device::Shape shape{.size = 2};
    std::vector<std::byte> words(device::proxied_word_bytes(shape));
    std::vector<std::byte> slots(2 * device::proxied_slot_bytes(shape));
    const device::ProxiedMemory memory{
        words.data(), {slots.data(), slots.data() + device::proxied_slot_bytes(shape)}};
    const auto wire = std::make_shared<Wire>();
    std::unique_ptr<device::HostProxy> host_proxy;
    std::promise<void> written;
    wire->on_look = [&](int looks) {
      if (looks != look) return;
      const device::End end = device::proxied_end(shape, memory, 0, plan::Direction::kSend, 0);
      *end.headers = device::Ll::line(8, device::Ll::flag(0));
      written.set_value();
      std::this_thread::sleep_for(20ms);
    };
    device::HostProxy::Options options;
    options.shape = shape;
    options.ways = {{.peer = 1, .memory = memory}};
    options.wires = {wire};
    options.names = {"here:1", "there:2"};
    options.clock = std::make_shared<SteadyClock>();
    CHECK(device::HostProxy::create(std::move(options), &host_proxy).ok(), "at look %d", look);
    CHECK(host_proxy->start().ok(), "at look %d", look);
    written.get_future().wait();
    host_proxy->close(10'000'000'000);
    CHECK(wire->sending.sent == 1, "%d segments sent, seen at look %d", wire->sending.sent, look);
  }
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
