// Links over several rails: which segments take which socket, that they come in order all the same,
// and that each socket is called by its own ends.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/tcp/raw_peer.h"

namespace pycoll::transport {
namespace {

using testing::Frame;
using testing::Medium;
using testing::RawPeer;

constexpr std::uint32_t kLong = 20'000;
constexpr std::uint32_t kShort = 1000;

// Sends a segment of each length on channel 1; what socket each of them took.
std::vector<int> sockets_of(RawPeer& peer, int sockets, const std::vector<std::uint32_t>& lengths) {
  static const std::vector<std::byte> memory(kSegmentBytesMax);
  SendChannel& channel = peer.link().send_channel(1);
  for (const std::uint32_t bytes : lengths) {
    CHECK(channel.hand_over({1, 0, bytes, 0}, memory.data()), "no free slot");
  }
  peer.poll();
  std::vector<int> took(lengths.size(), -1);
  for (int socket = 0; socket < sockets; ++socket) {
    for (const Frame& frame : peer.take_frames(socket)) {
      CHECK(frame.header.channel == 1 && frame.header.segment < took.size(), "segment %d",
            frame.header.segment);
      CHECK(frame.header.bytes == lengths[frame.header.segment], "segment %d has %u bytes",
            frame.header.segment, frame.header.bytes);
      took[frame.header.segment] = socket;
    }
  }
  CHECK(channel.drained(), "memory is still read");
  return took;
}

TEST(long_segments_take_the_sockets_in_turn) {
  RawPeer peer(4, Medium::kLoopback, 2);
  const auto took =
      sockets_of(peer, 4, {kLong, kShort, kLong, kSegmentBytesMax, 0, kLong, kShort, kLong});
  const std::vector<int> expected{1, 1, 2, 3, 1, 0, 1, 1};
  CHECK(took == expected, "segment %td took another socket",
        std::mismatch(took.begin(), took.end(), expected.begin()).first - took.begin());
}

TEST(one_rail_keeps_a_channel_on_one_socket) {
  for (const Medium medium : {Medium::kLoopback, Medium::kUnixPair}) {
    RawPeer peer(4, medium);
    const auto took = sockets_of(peer, 4, {kLong, kShort, kLong, kSegmentBytesMax});
    CHECK(took == std::vector<int>(4, 1), "a segment left home");
  }
}

TEST(segments_are_seen_in_order_however_they_come) {
  RawPeer peer(3);
  RecvChannel& channel = peer.link().recv_channel(2);
  // So many that all of them are told of when they are released.
  constexpr std::uint32_t kTurn = kTcpDepth * 3 / 4;
  // More than the numbers that a frame has for them.
  for (std::uint32_t first = 0; first < (1u << 16) + 100; first += kTurn) {
    for (std::uint32_t i = kTurn; i-- > 0;) {
      CHECK(channel.peek() == nullptr, "a segment before its turn, behind %u", first + i);
      peer.send_segment(RawPeer::data(2, i, first + i), first + i, static_cast<int>(i % 3));
      if (first % 4096 == 0) peer.poll(1);
    }
    peer.poll(10);  // a silent socket is looked at every eighth time
    for (std::uint32_t i = 0; i < kTurn; ++i) {
      const Segment* segment = channel.peek();
      CHECK(
          segment != nullptr && segment->header.sequence == first + i && segment->header.bytes == i,
          "segment %u of %u is another one", i, first);
      const auto expected = RawPeer::payload_of(RawPeer::data(2, i, first + i));
      CHECK(expected.empty() || std::memcmp(segment->data, expected.data(), i) == 0,
            "payload of segment %u of %u changed", i, first);
      channel.release();
    }
    CHECK(!peer.take_frames(2).empty() && peer.take_frames(0).empty(), "credits left home");
  }
  CHECK(peer.link().state() == LinkState::kOpen, "%s", peer.link().reason().c_str());
}

// Segments that come on a socket within ten seconds, until there are `count` of them.
std::vector<Frame> await_frames(RawPeer& peer, int socket, std::size_t count) {
  SteadyClock clock;
  const Nanoseconds begin = clock.now();
  std::vector<Frame> frames;
  while (frames.size() < count && clock.now() - begin < 10'000'000'000) {
    for (Frame& frame : peer.take_frames(socket)) frames.push_back(std::move(frame));
  }
  return frames;
}

TEST(a_full_rail_holds_only_its_own_segments) {
  RawPeer peer(2, Medium::kLoopback, 2);
  std::vector<std::byte> memory(kTcpDepth * kSegmentBytesMax, std::byte{0x11});
  std::size_t sent = 0;
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    SendChannel& channel = peer.link().send_channel(number);
    while (channel.hand_over({1, 0, kSegmentBytesMax, 0}, memory.data())) ++sent;
  }
  peer.poll();
  const std::size_t first = await_frames(peer, 1, sent / 2).size();
  CHECK(first == sent / 2, "%zu of %zu segments on one of two rails", first, sent);
  peer.transport().let_go(transport::LetGo::kAll);
  std::fill(memory.begin(), memory.end(), std::byte{0xee});
  const auto frames = await_frames(peer, 0, sent - first);
  CHECK(frames.size() == sent - first, "%zu segments on the other", frames.size());
  for (const Frame& frame : frames) {
    const auto same = std::count(frame.payload.begin(), frame.payload.end(), std::byte{0x11});
    CHECK(same == kSegmentBytesMax, "segment %d of channel %d changed", frame.header.segment,
          frame.header.channel);
  }
}

TEST(a_lost_rail_is_called_by_its_own_ends_and_frees_all_memory) {
  for (const int lost : {0, 1}) {
    RawPeer peer(2, Medium::kLoopback, 2);
    const std::vector<std::byte> memory(kSegmentBytesMax);
    SendChannel& channel = peer.link().send_channel(0);
    while (channel.hand_over({1, 0, kSegmentBytesMax, 0}, memory.data())) {
    }
    const std::string far = lost == 0 ? "127.0.0.1:" : "127.0.0.2:";
    CHECK(peer.name(lost).rfind(far, 0) == 0 &&
              peer.name(lost).find(" (here 127.0.0.") != std::string::npos,
          "a socket of rail %d is called %s", lost, peer.name(lost).c_str());
    peer.hang_up(lost);
    peer.poll();
    const std::string reason = peer.link().reason();
    CHECK(peer.link().state() == LinkState::kLost, "state %d",
          static_cast<int>(peer.link().state()));
    CHECK(reason.find(peer.name(lost)) != std::string::npos &&
              reason.find(peer.name(1 - lost)) == std::string::npos,
          "rail %d is not told from the other: %s", lost, reason.c_str());
    CHECK(channel.drained() && !channel.capabilities().sources->reads(memory.data(), memory.size()),
          "memory is held");
  }
}

}  // namespace
}  // namespace pycoll::transport

RUN_TESTS()
