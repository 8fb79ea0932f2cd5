// What is particular to TCP and therefore not in the conformance suite: which frames are sent and
// when, streams that arrive in pieces, full sockets, sockets' options, silence.
#include "transport/tcp/tcp.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>

#include "base/prng.h"
#include "tests/cpp/support/allocations.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/tcp/raw_peer.h"

namespace pycoll::transport {
namespace {

using testing::Frame;
using testing::Medium;
using testing::RawPeer;
using testing::SocketPair;

constexpr std::byte kNothing{};

std::vector<UniqueFd> list_of(UniqueFd fd) {
  std::vector<UniqueFd> list;
  list.push_back(std::move(fd));
  return list;
}

void expect_payload(const Segment* segment, const FrameHeader& header) {
  CHECK(segment != nullptr, "no segment %llu", static_cast<unsigned long long>(header.sequence));
  CHECK(segment->header.sequence == header.sequence && segment->header.bytes == header.bytes,
        "segment %llu of %u bytes", static_cast<unsigned long long>(segment->header.sequence),
        segment->header.bytes);
  const auto expected = RawPeer::payload_of(header);
  CHECK(expected.empty() || std::memcmp(segment->data, expected.data(), expected.size()) == 0,
        "payload of segment %llu changed", static_cast<unsigned long long>(header.sequence));
}

// Two transports with one socket between them.
struct Pair {
  explicit Pair(Medium medium) {
    SocketPair sockets = testing::connected_pair(medium);
    CHECK(a.attach(1, list_of(std::move(sockets.near)), "b").ok(), "attach");
    CHECK(b.attach(0, list_of(std::move(sockets.far)), "a").ok(), "attach");
  }
  void poll() {
    a.poll();
    b.poll();
  }
  TcpTransport a{0, 2};
  TcpTransport b{1, 2};
};

TEST(a_commit_leaves_at_once_as_one_frame) {
  RawPeer peer;
  SendChannel& channel = peer.link().send_channel(6);
  std::byte* slot_buffer = channel.reserve(300);
  std::memset(slot_buffer, 7, 300);
  channel.commit({11, 22, 300, 33});
  const auto frames = peer.take_frames();
  CHECK(frames.size() == 1, "%zu frames", frames.size());
  const FrameHeader& header = frames[0].header;
  CHECK(header.type == FrameType::kData && header.channel == 6 && header.sequence == 11 &&
            header.agreement == 22 && header.tag == 33 && header.bytes == 300,
        "channel %d, sequence %llu", header.channel,
        static_cast<unsigned long long>(header.sequence));
  CHECK(frames[0].payload[0] == std::byte{7} && frames[0].payload[299] == std::byte{7}, "payload");
}

TEST(channels_travel_on_the_socket_of_their_number) {
  RawPeer peer(3);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    CHECK(peer.link().send_channel(number).hand_over({1, 0, 0, 0}, &kNothing), "full");
  }
  for (int socket = 0; socket < 3; ++socket) {
    std::uint32_t expected = static_cast<std::uint32_t>(socket);
    for (const Frame& frame : peer.take_frames(socket)) {
      CHECK(frame.header.channel == expected, "channel %d on socket %d, expected %u",
            frame.header.channel, socket, expected);
      expected += 3;
    }
    CHECK(expected >= kChannelsMax, "channel %u did not come on socket %d", expected, socket);
  }
}

// A long stream of frames, cut at random places: every segment appears when its last byte is there
// and not before.
TEST(segments_appear_when_whole) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Prng prng(seed);
    RawPeer peer;
    for (std::uint64_t sequence = 1; sequence <= 12; ++sequence) {
      const std::uint64_t largest = prng.chance(1, 3) ? kSegmentBytesMax : 5000;
      FrameHeader header =
          RawPeer::data(static_cast<std::uint32_t>(prng.below(kChannelsMax)),
                        static_cast<std::uint32_t>(prng.below(largest + 1)), sequence);
      const std::uint32_t number = header.channel;
      peer.finish(&header);
      const auto payload = RawPeer::payload_of(header);
      std::vector<std::byte> bytes(sizeof(header));
      std::memcpy(bytes.data(), &header, sizeof(header));
      bytes.insert(bytes.end(), payload.begin(), payload.end());
      RecvChannel& channel = peer.link().recv_channel(number);
      std::size_t sent = 0;
      while (sent < bytes.size()) {
        const std::size_t piece =
            std::min(bytes.size() - sent, 1 + prng.below(prng.chance(1, 2) ? 60 : bytes.size()));
        CHECK(channel.peek() == nullptr, "seed %llu: a segment after %zu of %zu bytes",
              static_cast<unsigned long long>(seed), sent, bytes.size());
        peer.send_bytes(bytes.data() + sent, piece);
        sent += piece;
        peer.poll(1 + static_cast<int>(prng.below(3)));
      }
      peer.poll(4);
      expect_payload(channel.peek(), header);
      channel.release();
    }
    CHECK(peer.link().state() == LinkState::kOpen, "seed %llu: %s",
          static_cast<unsigned long long>(seed), peer.link().reason().c_str());
  }
}

TEST(many_frames_in_one_piece_are_all_taken) {
  RawPeer peer;
  std::vector<std::byte> bytes;
  for (std::uint32_t i = 0; i < kTcpDepth * kChannelsMax; ++i) {
    FrameHeader header = RawPeer::data(i % kChannelsMax, i * 3, i);
    peer.finish(&header);
    const auto payload = RawPeer::payload_of(header);
    const auto* raw = reinterpret_cast<const std::byte*>(&header);
    bytes.insert(bytes.end(), raw, raw + sizeof(header));
    bytes.insert(bytes.end(), payload.begin(), payload.end());
  }
  peer.send_bytes(bytes.data(), bytes.size());
  peer.poll();
  for (std::uint32_t i = 0; i < kTcpDepth * kChannelsMax; ++i) {
    RecvChannel& channel = peer.link().recv_channel(i % kChannelsMax);
    expect_payload(channel.peek(), RawPeer::data(i % kChannelsMax, i * 3, i));
    channel.release();
  }
}

TEST(a_full_socket_keeps_the_newest_notice) {
  RawPeer peer;
  const std::vector<std::byte> memory(kSegmentBytesMax);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    SendChannel& channel = peer.link().send_channel(number);
    while (channel.hand_over({1, 0, kSegmentBytesMax, 0}, memory.data())) {
    }
  }
  SendChannel& last = peer.link().send_channel(kChannelsMax - 1);
  CHECK(!last.drained(), "16 MiB fit in a socket that nobody reads");
  for (std::uint64_t number = 1; number <= 50; ++number) {
    Notice notice;
    notice.sequence = number;
    peer.link().post(notice);
    peer.transport().poll();
  }
  std::uint64_t newest = 0;
  int notices = 0;
  std::size_t segments = 0;
  for (const Frame& frame : peer.take_frames()) {
    segments += frame.header.type == FrameType::kData;
    if (frame.header.type != FrameType::kNotice) continue;
    std::memcpy(&newest, frame.payload.data(), sizeof(newest));
    ++notices;
  }
  CHECK(newest == 50 && notices <= 2, "newest %llu of %d notices",
        static_cast<unsigned long long>(newest), notices);
  CHECK(segments == kTcpDepth * kChannelsMax, "%zu segments", segments);
  CHECK(last.drained(), "everything was read and still not drained");
}

TEST(a_loss_frees_memory_that_was_handed_over) {
  RawPeer peer;
  auto memory = std::make_unique<std::vector<std::byte>>(kSegmentBytesMax);
  SendChannel& channel = peer.link().send_channel(0);
  SendChannel& other = peer.link().send_channel(1);
  while (channel.hand_over({1, 0, kSegmentBytesMax, 0}, memory->data())) {
  }
  while (other.hand_over({1, 0, kSegmentBytesMax, 0}, memory->data())) {
  }
  peer.transport().poll();
  CHECK(!other.drained(), "2 MiB fit in a socket that nobody reads");
  peer.hang_up();
  peer.poll();
  CHECK(peer.link().state() == LinkState::kLost && other.drained(), "state %d",
        static_cast<int>(peer.link().state()));
  memory.reset();
  peer.poll();
}

// The memory changes right after let_go(); what arrives must be as it was before.
TEST(let_go_sends_from_copies) {
  RawPeer peer;
  std::vector<std::byte> memory(kSegmentBytesMax, std::byte{0x11});
  std::size_t sent = 0;
  for (std::uint32_t number = 0; number < 3; ++number) {
    SendChannel& channel = peer.link().send_channel(number);
    while (channel.hand_over({1, 0, kSegmentBytesMax, 0}, memory.data())) ++sent;
  }
  peer.transport().poll();
  CHECK(!peer.link().send_channel(2).drained(), "3 MiB fit in a socket that nobody reads");
  peer.transport().let_go(transport::LetGo::kAll);
  std::fill(memory.begin(), memory.end(), std::byte{0xee});
  const auto frames = peer.take_frames();
  CHECK(frames.size() == sent, "%zu of %zu segments", frames.size(), sent);
  for (const Frame& frame : frames) {
    const auto same = std::count(frame.payload.begin(), frame.payload.end(), std::byte{0x11});
    CHECK(same == kSegmentBytesMax, "%zu bytes changed in segment %u of channel %d",
          kSegmentBytesMax - static_cast<std::size_t>(same), frame.header.number,
          frame.header.channel);
  }
}

TEST(nothing_is_allocated_after_first_use) {
  for (const Medium medium : {Medium::kUnixPair, Medium::kLoopback}) {
    Pair pair(medium);
    SendChannel& there = pair.a.link(1)->send_channel(0);
    SendChannel& back = pair.b.link(0)->send_channel(0);
    RecvChannel& at_b = pair.b.link(0)->recv_channel(0);
    RecvChannel& at_a = pair.a.link(1)->recv_channel(0);
    std::vector<std::byte> memory(kSegmentBytesMax);
    std::uint64_t before = 0;
    CHECK(testing::allocations() > 0, "the counter does not count");
    for (std::uint64_t round = 0; round < 500; ++round) {
      if (round == 10) before = testing::allocations();
      const auto bytes = static_cast<std::uint32_t>(round % 5 == 0 ? kSegmentBytesMax : round);
      CHECK(there.reserve(bytes) != nullptr, "no free slot");
      there.commit({round, 0, bytes, 0});
      while (at_b.peek() == nullptr || !there.drained()) pair.poll();
      at_b.release();
      CHECK(back.hand_over({round, 0, bytes, 0}, memory.data()), "no free slot");
      while (at_a.peek() == nullptr || !back.drained()) pair.poll();
      at_a.release();
      Notice notice;
      notice.sequence = round;
      pair.a.link(1)->post(notice);
      if (round % 50 == 0 && pair.a.arm()) pair.a.disarm();
    }
    CHECK(testing::allocations() == before, "%llu allocations in 490 rounds",
          static_cast<unsigned long long>(testing::allocations() - before));
  }
}

TEST(close_waits_a_bounded_time_for_a_peer_that_does_not_read) {
  for (const Medium medium : {Medium::kUnixPair, Medium::kLoopback}) {
    RawPeer peer(1, medium);
    const std::vector<std::byte> memory(kSegmentBytesMax);
    testing::limit_send_buffer(UniqueFd(::dup(peer.fd())), 4096);
    for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
      SendChannel& channel = peer.link().send_channel(number);
      while (channel.hand_over({1, 0, kSegmentBytesMax, 0}, memory.data())) {
      }
    }
    SteadyClock clock;
    const Nanoseconds begin = clock.now();
    peer.transport().close();
    const Nanoseconds took = clock.now() - begin;
    CHECK(took < 3 * TcpTransport::kCloseLasts, "close() took %lld ms",
          static_cast<long long>(took / 1'000'000));
  }
}

TEST(close_says_goodbye_behind_everything) {
  RawPeer peer;
  SendChannel& channel = peer.link().send_channel(0);
  CHECK(channel.hand_over({1, 0, 0, 0}, &kNothing), "full");
  peer.transport().close();
  const auto frames = peer.take_frames();
  CHECK(frames.size() == 3 && frames[0].header.type == FrameType::kData &&
            frames[1].header.type == FrameType::kNotice &&
            frames[2].header.type == FrameType::kGoodbye,
        "%zu frames", frames.size());
  char byte = 0;
  CHECK(::recv(peer.fd(), &byte, 1, MSG_DONTWAIT) == 0, "no end of file after the goodbye");
  CHECK(peer.transport().event_fd() == -1, "a descriptor is left");
}

TEST(wrong_attachments_are_refused) {
  TcpTransport transport(1, 3);
  const auto refused = [&](int peer, std::vector<UniqueFd> sockets, const char* why) {
    const Status status = transport.attach(peer, std::move(sockets), "somewhere");
    CHECK(status.code() == Code::kInvalidArgument, "peer %d: %s", peer, status.message().c_str());
    CHECK(status.message().find(why) != std::string::npos, "\"%s\" does not say \"%s\"",
          status.message().c_str(), why);
  };
  refused(3, list_of(testing::unix_pair().near), "peers are 0 to 2");
  refused(-1, list_of(testing::unix_pair().near), "peers are 0 to 2");
  refused(1, list_of(testing::unix_pair().near), "this rank itself");
  refused(0, {}, "0 sockets given, 1 to 8");
  refused(0, std::vector<UniqueFd>(9), "9 sockets given");
  refused(0, list_of(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC))), "is no socket");
  refused(0, list_of(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))), "not connected");
  refused(0, list_of(UniqueFd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0))), "another type");
  CHECK(transport.link(0) == nullptr, "a refused attach left a link");
  SocketPair good = testing::unix_pair();
  CHECK(transport.attach(0, list_of(std::move(good.near)), "x").ok(), "a good socket was refused");
  refused(0, list_of(testing::unix_pair().near), "attached already");
}

TEST(sockets_are_prepared) {
  SocketPair pair = testing::loopback_pair();
  const UniqueFd copy = testing::duplicate(pair.near);
  TcpTransport transport(0, 2);
  CHECK(transport.attach(1, list_of(std::move(pair.near)), "x").ok(), "attach");
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t bytes = sizeof(value);
    CHECK(::getsockopt(copy.get(), level, name, &value, &bytes) == 0, "%s", std::strerror(errno));
    return value;
  };
  CHECK((::fcntl(copy.get(), F_GETFL) & O_NONBLOCK) != 0, "the socket blocks");
  CHECK(option(IPPROTO_TCP, TCP_NODELAY) == 1, "small frames wait for each other");
  CHECK(option(SOL_SOCKET, SO_KEEPALIVE) == 1, "nobody looks after an idle connection");
  const int seconds = option(IPPROTO_TCP, TCP_KEEPIDLE) +
                      option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT);
  CHECK(seconds == 5, "an idle vanished host is found after %d s", seconds);
  CHECK(option(IPPROTO_TCP, TCP_USER_TIMEOUT) == 0, "would end connections to busy peers");
}

TEST(silence_is_judged_by_answers) {
  constexpr Nanoseconds kSecond = 1'000'000'000;
  VanishWatch watch;
  for (Nanoseconds now = 0; now < 60; ++now) {  // idle or answered at once: never suspicious
    CHECK(!watch.has_vanished({false, now * kSecond}, now * kSecond), "second %lld",
          static_cast<long long>(now));
  }
  for (Nanoseconds now = 60; now < 120; ++now) {  // answers come, slowly
    CHECK(!watch.has_vanished({true, now % 3 * kSecond}, now * kSecond), "second %lld",
          static_cast<long long>(now));
  }
  CHECK(!watch.has_vanished({false, 0}, 120 * kSecond), "answered");
  for (Nanoseconds now = 121; now < 125; ++now) {
    CHECK(!watch.has_vanished({true, 50 * kSecond}, now * kSecond), "after %lld s",
          static_cast<long long>(now - 121));
  }
  CHECK(watch.has_vanished({true, 54 * kSecond}, 125 * kSecond), "four seconds without an answer");
}

}  // namespace
}  // namespace pycoll::transport

RUN_TESTS()
