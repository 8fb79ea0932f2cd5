// Flow control of TCP: when frames leave, and when peers hear of free slots.
#include <sys/socket.h>

#include <cstring>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/tcp/raw_peer.h"
#include "transport/tcp/tcp.h"

namespace pycoll::transport {
namespace {

using testing::RawPeer;

constexpr std::byte kNothing{};

}  // namespace

// The rule of WIRE.md: told at once to a sender that may be waiting, or when most of the depth
// is free.
TEST(credits_are_told_when_due_and_not_before) {
  RawPeer peer;
  RecvChannel& channel = peer.link().recv_channel(0);
  const auto take = [&] {
    peer.poll(3);
    CHECK(channel.peek() != nullptr, "no segment");
    channel.release();
  };
  constexpr std::uint32_t kMany = kTcpDepth * 3 / 4;
  for (std::uint32_t taken = 1; taken < kMany; ++taken) {
    peer.send(RawPeer::data(0, 8));
    take();
    CHECK(peer.take_frames().empty(), "a credit for %u segments of a channel with free slots",
          taken);
  }
  peer.send(RawPeer::data(0, 8));
  take();
  auto frames = peer.take_frames();
  CHECK(frames.size() == 1 && frames[0].header.type == FrameType::kCredit &&
            frames[0].header.released[0] == kMany,
        "most of the depth is free: %zu frames", frames.size());
  for (std::uint32_t i = 0; i < kTcpDepth; ++i) peer.send(RawPeer::data(0, 8));
  take();
  peer.poll(1);
  frames = peer.take_frames();
  CHECK(frames.size() == 1 && frames[0].header.released[0] == kMany + 1,
        "the sender has no slot left: %zu frames", frames.size());
  for (std::uint32_t i = 0; i < kMany + 1; ++i) channel.release();
  frames = peer.take_frames();
  CHECK(frames.size() == 1 && frames[0].header.released[0] == 2 * kMany + 1,
        "many releases at once: %zu frames, the first tells of %d", frames.size(),
        frames.empty() ? -1 : frames[0].header.released[0]);
}

TEST(credits_ride_on_data) {
  RawPeer peer;
  RecvChannel& recv = peer.link().recv_channel(2);
  SendChannel& send = peer.link().send_channel(1);
  for (std::uint8_t round = 1; round < 200; ++round) {
    FrameHeader header = RawPeer::data(2, 8);
    header.released[1] = static_cast<std::uint8_t>(round - 1);
    peer.send(header);
    peer.poll(3);
    CHECK(recv.peek() != nullptr, "no segment in round %d", round);
    recv.release();
    CHECK(send.hand_over({round, 0, 0, 0}, &kNothing), "no free slot in round %d", round);
    const auto frames = peer.take_frames();
    CHECK(frames.size() == 1 && frames[0].header.type == FrameType::kData &&
              frames[0].header.released[2] == round,
          "round %d: %zu frames", round, frames.size());
  }
}

// Long ones leave with those that are committed until the next poll(); short ones at once.
TEST(long_segments_gather_until_a_poll) {
  RawPeer peer;
  const std::vector<std::byte> memory(kSegmentBytesMax);
  SendChannel& channel = peer.link().send_channel(0);
  SendChannel& other = peer.link().send_channel(1);
  for (SendChannel* each : {&channel, &other}) {
    CHECK(each->hand_over({1, 0, 20'000, 0}, memory.data()), "no free slot");
    transport::SourceRecord& sources = *each->capabilities().sources;
    CHECK(!each->drained() && sources.reads(memory.data() + 19'999, 1), "it left alone");
    CHECK(!sources.reads(memory.data() + 20'000, 1) && !sources.reads(memory.data() - 1, 1),
          "next to what was handed over");
  }
  CHECK(peer.take_frames().empty(), "it left alone");
  peer.transport().poll();
  CHECK(channel.drained() && other.drained(), "still here");
  CHECK(!other.capabilities().sources->reads(memory.data(), 1), "still here");
  CHECK(peer.take_frames().size() == 2, "a poll did not send both");
  CHECK(channel.hand_over({2, 0, 100, 0}, memory.data()) && channel.drained(), "it waits");
}

// Both links end in one stream, so that its reader sees the order of all writes. Peer 1 has two
// sockets, for the even and the odd channels.
TEST(long_segments_leave_in_the_order_of_their_commits_to_all_peers) {
  testing::SocketPair pair = testing::unix_pair();
  TcpTransport transport(0, 3);
  for (int peer : {1, 2}) {
    std::vector<UniqueFd> sockets;
    for (int socket = peer; socket < 3; ++socket) {
      sockets.push_back(testing::duplicate(pair.near));
    }
    CHECK(transport.attach(peer, std::move(sockets), "both").ok(), "not attached");
  }
  constexpr std::uint32_t kBytes = 16 * 1024;
  const std::vector<std::byte> memory(kBytes);
  struct Commit {
    int peer;
    std::uint32_t channel;
  };
  constexpr Commit kCommits[] = {{2, 2}, {1, 0}, {1, 1}, {1, 0}, {1, 1}, {2, 2}, {2, 2}, {1, 1}};
  for (const auto& [peer, channel] : kCommits) {
    CHECK(transport.link(peer)->send_channel(channel).hand_over({1, 0, kBytes, 0}, memory.data()),
          "no free slot");
  }
  transport.poll();
  // Of the four to peer 1 those of a socket come together, since they leave in one system call.
  for (int channel : {2, 0, 0, 1, 1, 2, 2, 1}) {
    std::vector<std::byte> frame(sizeof(FrameHeader) + kBytes);
    const ssize_t got = ::recv(pair.far.get(), frame.data(), frame.size(), MSG_WAITALL);
    CHECK(got == static_cast<ssize_t>(frame.size()), "%zd bytes", got);
    FrameHeader header;
    std::memcpy(&header, frame.data(), sizeof(header));
    CHECK(header.channel == channel, "channel %d in the place of %d", header.channel, channel);
  }
  transport.poll();
}

// A socket that has been silent for long is looked at less often, but is heard; as is one that
// closes.
TEST(silent_sockets_are_heard_next_to_a_busy_one) {
  RawPeer peer(2);
  RecvChannel& busy = peer.link().recv_channel(0);
  RecvChannel& silent = peer.link().recv_channel(1);
  for (std::uint32_t round = 0; round < 100; ++round) {
    peer.send(RawPeer::data(0, 8));
    if (round % 30 == 29) peer.send(RawPeer::data(1, 8), 1);
    int looks = 0;
    for (; busy.peek() == nullptr && looks < 10; ++looks) peer.poll(1);
    CHECK(looks <= 2, "%d looks for what comes every time", looks);
    busy.release();
    if (round % 30 != 29) continue;
    for (looks = 0; silent.peek() == nullptr && looks < 100; ++looks) peer.poll(1);
    CHECK(looks <= 8, "%d looks for what comes seldom", looks);
    silent.release();
  }
  peer.hang_up(1);
  for (int looks = 0; looks < 8; ++looks) peer.poll(1);
  CHECK(peer.link().state() == LinkState::kLost, "an end is not seen");
}

}  // namespace pycoll::transport

RUN_TESTS()
