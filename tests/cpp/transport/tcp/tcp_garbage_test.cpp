// What a TCP link makes of a peer that breaks the rules of WIRE.md: it is lost, with a reason that
// names the peer and the rule, and nothing worse happens. What had arrived whole stays readable.
#include <sys/socket.h>

#include <string>

#include "base/prng.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/tcp/raw_peer.h"

namespace pycoll::transport {
namespace {

using testing::Medium;
using testing::RawPeer;

constexpr std::byte kNothing{};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void expect_lost(RawPeer& peer, const std::string& why, int socket = 0) {
  peer.poll();
  CHECK(peer.link().state() == LinkState::kLost, "state %d, waiting for: %s",
        static_cast<int>(peer.link().state()), why.c_str());
  CHECK(contains(peer.link().reason(), peer.name(socket)), "%s is not named: %s",
        peer.name(socket).c_str(), peer.link().reason().c_str());
  CHECK(contains(peer.link().reason(), why), "\"%s\" does not say \"%s\"",
        peer.link().reason().c_str(), why.c_str());
}

void expect_malformed(RawPeer& peer, const std::string& why) {
  expect_lost(peer, why);
  CHECK(peer.link().reason().rfind("malformed frame from 10.0.0.2:4711: ", 0) == 0, "%s",
        peer.link().reason().c_str());
}

// A good segment first; it must survive what follows.
void send_good(RawPeer& peer) { peer.send(RawPeer::data(0, 100)); }
void expect_good(RawPeer& peer) {
  RecvChannel& channel = peer.link().recv_channel(0);
  const Segment* segment = channel.peek();
  CHECK(segment != nullptr && segment->header.bytes == 100, "the segment before the fault is gone");
  CHECK(std::memcmp(segment->data, RawPeer::payload_of(RawPeer::data(0, 100)).data(), 100) == 0,
        "the segment before the fault changed");
  channel.release();
  CHECK(channel.peek() == nullptr, "a segment that was never whole");
}

TEST(garbage_is_no_frame) {
  RawPeer peer;
  send_good(peer);
  const std::string text = "GET / HTTP/1.1\r\nHost: somewhere.example\r\nAccept: */*\r\n\r\n";
  peer.send_bytes(text.data(), text.size());
  expect_malformed(peer, "no frame begins where one was expected");
  expect_good(peer);
}

TEST(another_version_is_named) {
  RawPeer peer;
  FrameHeader header = RawPeer::data(0, 0);
  header.version = 9;
  peer.send(header);
  expect_malformed(peer, "version 9, expected 7");
}

TEST(a_changed_header_is_found) {
  RawPeer peer;
  send_good(peer);
  FrameHeader header = RawPeer::data(0, 10);
  peer.finish(&header);
  header.tag ^= 1;
  peer.send_bytes(&header, sizeof(header));
  expect_malformed(peer, "header check");
  expect_good(peer);
}

TEST(a_missing_frame_is_found) {
  RawPeer peer;
  FrameHeader dropped = RawPeer::data(0, 0);
  peer.finish(&dropped);
  peer.send(RawPeer::data(0, 0));
  expect_malformed(peer, "frame number 1, expected 0");
}

TEST(oversized_lengths_are_refused) {
  for (const std::uint32_t bytes : {65537u, 1u << 20, 0xffffffffu}) {
    RawPeer peer;
    send_good(peer);
    FrameHeader header = RawPeer::data(0, bytes);
    peer.finish(&header);
    peer.send_bytes(&header, sizeof(header));
    expect_malformed(peer, std::to_string(bytes) + " payload bytes");
    expect_good(peer);
  }
}

TEST(segments_beyond_the_credits_are_refused) {
  for (const std::uint32_t released : {0u, 1u}) {
    RawPeer peer;
    for (std::uint32_t i = 0; i < kTcpDepth; ++i) peer.send(RawPeer::data(3, 50, i + 1));
    peer.poll();
    RecvChannel& channel = peer.link().recv_channel(3);
    if (released == 1) channel.release();
    peer.poll();
    for (std::uint32_t i = 0; i < released; ++i) peer.send(RawPeer::data(3, 50, 9));
    peer.poll();
    CHECK(peer.link().state() == LinkState::kOpen, "lost too early: %s",
          peer.link().reason().c_str());
    peer.send(RawPeer::data(3, 50, 10));
    expect_malformed(peer, "beyond the credits of channel 3");
    for (std::uint32_t i = 0; i < kTcpDepth; ++i) {
      CHECK(channel.peek() != nullptr, "segment %u is gone", i);
      channel.release();
    }
    CHECK(channel.peek() == nullptr, "the refused segment can be read");
  }
}

TEST(counters_of_what_was_never_sent_are_refused) {
  for (const bool opened : {false, true}) {
    RawPeer peer;
    if (opened) {
      CHECK(peer.link().send_channel(2).hand_over({1, 0, 0, 0}, &kNothing),
            "a new channel is full");
    }
    FrameHeader header = RawPeer::control(FrameType::kCredit);
    header.released[2] = opened ? 2 : 1;
    peer.send(header);
    expect_malformed(peer, "released segments of channel 2");
  }
}

TEST(counters_that_run_backwards_are_refused) {
  RawPeer peer;
  SendChannel& channel = peer.link().send_channel(0);
  for (int i = 0; i < 3; ++i) CHECK(channel.hand_over({1, 0, 0, 0}, &kNothing), "full at %d", i);
  FrameHeader header = RawPeer::control(FrameType::kCredit);
  for (const int released : {2, 2, 3}) {
    header.released[0] = static_cast<std::uint8_t>(released);
    peer.send(header);
  }
  peer.poll();
  CHECK(peer.link().state() == LinkState::kOpen, "%s", peer.link().reason().c_str());
  header.released[0] = 2;
  peer.send(header);
  expect_malformed(peer, "released segments of channel 0");
}

TEST(frames_on_the_wrong_socket_are_refused) {
  RawPeer noticed(3);
  noticed.send(RawPeer::control(FrameType::kNotice), 1);
  expect_malformed(noticed, "a notice on socket 1");
  RawPeer counted(3);
  for (int i = 0; i < 2; ++i) {
    CHECK(counted.link().send_channel(3).hand_over({1, 0, 0, 0}, &kNothing), "full");
  }
  FrameHeader credit = RawPeer::control(FrameType::kCredit);
  credit.released[3] = 1;
  counted.send(credit, 0);
  counted.poll();
  CHECK(counted.link().state() == LinkState::kOpen, "%s", counted.link().reason().c_str());
  counted.send(credit, 1);
  expect_malformed(counted, "released segments of channel 3");
}

TEST(segments_that_came_before_are_refused) {
  for (const bool whole : {true, false}) {
    RawPeer peer(2);
    FrameHeader header = RawPeer::data(3, 10);
    header.segment = 5;
    peer.seal(&header);
    if (whole) {
      peer.send_finished(header);
    } else {
      peer.send_bytes(&header, sizeof(header));
    }
    peer.poll();
    CHECK(peer.link().state() == LinkState::kOpen, "%s", peer.link().reason().c_str());
    peer.send_segment(RawPeer::data(3, 10), 5, 1);
    expect_malformed(peer, "segment 5, sent before or beyond the credits of channel 3");
    CHECK(peer.link().recv_channel(3).peek() == nullptr, "a segment ahead of its turn");
  }
  RawPeer peer;
  peer.send(RawPeer::data(3, 10));
  peer.poll();
  peer.link().recv_channel(3).release();
  peer.send_segment(RawPeer::data(3, 10), 0);
  expect_malformed(peer, "segment 0, sent before or beyond the credits of channel 3");
}

TEST(bytes_after_goodbye_are_refused) {
  RawPeer peer;
  send_good(peer);
  FrameHeader goodbye = RawPeer::control(FrameType::kGoodbye);
  peer.finish(&goodbye);
  char bytes[sizeof(goodbye) + 1] = {};
  std::memcpy(bytes, &goodbye, sizeof(goodbye));
  peer.send_bytes(bytes, sizeof(bytes));
  expect_malformed(peer, "bytes after its goodbye");
  expect_good(peer);
}

TEST(an_end_without_goodbye_is_a_loss) {
  for (const Medium medium : {Medium::kUnixPair, Medium::kLoopback}) {
    for (const std::size_t cut :
         {std::size_t{0}, std::size_t{1}, std::size_t{47}, std::size_t{48}, std::size_t{5047}}) {
      RawPeer peer(1, medium);
      send_good(peer);
      FrameHeader header = RawPeer::data(0, 5000);
      peer.finish(&header);
      std::vector<char> bytes(sizeof(header) + header.bytes);
      std::memcpy(bytes.data(), &header, sizeof(header));
      peer.send_bytes(bytes.data(), cut);
      peer.hang_up();
      expect_lost(peer, cut == 0 ? "without a goodbye:" : "in the middle of a frame");
      expect_good(peer);
    }
  }
}

TEST(a_reset_is_named) {
  RawPeer peer(1, Medium::kLoopback);
  const linger hard{1, 0};
  CHECK(::setsockopt(peer.fd(), SOL_SOCKET, SO_LINGER, &hard, sizeof(hard)) == 0, "no linger");
  peer.hang_up();
  expect_lost(peer, "connection reset by " + peer.name());
}

TEST(one_broken_socket_loses_the_link_but_not_what_arrived) {
  RawPeer peer(3);
  peer.send(RawPeer::data(1, 70), 1);
  peer.send(RawPeer::data(2, 80), 2);
  peer.hang_up(0);
  expect_lost(peer, "closed the connection");
  for (const std::uint32_t number : {1u, 2u}) {
    CHECK(peer.link().recv_channel(number).peek() != nullptr, "channel %u lost its segment",
          number);
  }
}

TEST(random_bytes_never_do_harm) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Prng prng(seed);
    RawPeer peer(1 + static_cast<int>(prng.below(2)));
    for (std::uint64_t good = prng.below(4); good > 0; --good) {
      peer.send(RawPeer::data(0, static_cast<std::uint32_t>(prng.below(9000)), good));
    }
    std::vector<std::uint8_t> noise(1 + prng.below(300));
    for (auto& byte : noise) byte = static_cast<std::uint8_t>(prng.next());
    peer.send_bytes(noise.data(), noise.size());
    peer.poll();
    if (noise.size() >= sizeof(FrameHeader)) {
      CHECK(peer.link().state() == LinkState::kLost, "seed %llu: %zu random bytes were accepted",
            static_cast<unsigned long long>(seed), noise.size());
    }
    peer.hang_up();
    expect_lost(peer, "");
  }
}

}  // namespace
}  // namespace pycoll::transport

RUN_TESTS()
