// Frames that are read to where they are expected: whatever comes instead, and however the stream
// is cut, every segment arrives as it was sent.
#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "base/prng.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/transport/tcp/raw_peer.h"

namespace pycoll::transport {
namespace {

using testing::Frame;
using testing::RawPeer;

constexpr std::uint32_t kChannels = 3;
constexpr std::uint64_t kSeeds = 300;

// A peer that sends runs of like segments, keeps to the credits, and writes in pieces of any size.
class Sender {
 public:
  explicit Sender(std::uint64_t seed) : seed_(seed), prng_(seed) {}

  void run() {
    const std::size_t piece = std::size_t{1} << (4 + prng_.below(14));
    // Short pieces cut a stream in many places, and each costs a system call.
    const int runs = piece < 512 ? 8 : 40;
    for (int i = 0; i < runs; ++i) {
      const auto channel = static_cast<std::uint32_t>(prng_.below(kChannels));
      const std::uint32_t bytes = kLengths[prng_.below(kLengths.size())];
      for (std::uint64_t like = 1 + prng_.below(10); like != 0; --like) add(channel, bytes);
      if (prng_.chance(1, 6)) append(RawPeer::control(FrameType::kCredit));
      if (prng_.chance(2, 3)) write(piece);
    }
    write(piece);
    peer_.poll();
    take();
    for (const auto& channel : expected_) {
      CHECK(channel.empty(), "seed %llu: %zu segments did not arrive", seed(), channel.size());
    }
  }

 private:
  static constexpr std::array<std::uint32_t, 8> kLengths{0,      8,      4096,  4097,
                                                         20'000, 20'000, 65000, kSegmentBytesMax};

  unsigned long long seed() const { return seed_; }

  void add(std::uint32_t channel, std::uint32_t bytes) {
    while (sent_[channel] - told_[channel] == kTcpDepth) {
      write(kSegmentBytesMax);
      peer_.poll(1);
      take();
      hear();
    }
    ++sent_[channel];
    expected_[channel].push_back(RawPeer::data(channel, bytes, ++sequence_));
    append(expected_[channel].back());
  }

  void append(FrameHeader header) {
    peer_.finish(&header);
    const auto* begin = reinterpret_cast<const std::byte*>(&header);
    stream_.insert(stream_.end(), begin, begin + sizeof(header));
    const std::vector<std::byte> payload = RawPeer::payload_of(header);
    stream_.insert(stream_.end(), payload.begin(), payload.end());
  }

  void write(std::size_t piece) {
    for (std::size_t done = 0; done != stream_.size();) {
      const std::size_t bytes =
          std::min<std::size_t>(stream_.size() - done, 1 + prng_.below(piece));
      peer_.send_bytes(stream_.data() + done, bytes);
      done += bytes;
      if (prng_.chance(1, 4)) peer_.poll(1);
      if (prng_.chance(1, 8)) take();
    }
    stream_.clear();
  }

  void take() {
    for (std::uint32_t number = 0; number < kChannels; ++number) {
      RecvChannel& channel = peer_.link().recv_channel(number);
      for (const Segment* found; (found = channel.peek()) != nullptr; channel.release()) {
        CHECK(!expected_[number].empty(), "seed %llu: a segment that was not sent", seed());
        const FrameHeader sent = expected_[number].front();
        expected_[number].pop_front();
        CHECK(found->header.sequence == sent.sequence && found->header.bytes == sent.bytes,
              "seed %llu: segment %llu of %u bytes is number %llu of %u", seed(),
              static_cast<unsigned long long>(sent.sequence), sent.bytes,
              static_cast<unsigned long long>(found->header.sequence), found->header.bytes);
        const std::vector<std::byte> payload = RawPeer::payload_of(sent);
        CHECK(std::equal(payload.begin(), payload.end(), found->data), "seed %llu: segment %llu",
              seed(), static_cast<unsigned long long>(sent.sequence));
      }
    }
  }

  void hear() {
    for (const Frame& frame : peer_.take_frames()) {
      for (std::uint32_t number = 0; number < kChannels; ++number) {
        told_[number] += static_cast<std::uint8_t>(frame.header.released[number] -
                                                   static_cast<std::uint8_t>(told_[number]));
      }
    }
  }

  const std::uint64_t seed_;
  Prng prng_;
  RawPeer peer_;
  std::vector<std::byte> stream_;
  std::array<std::deque<FrameHeader>, kChannels> expected_;
  std::array<std::uint32_t, kChannels> sent_{};
  std::array<std::uint32_t, kChannels> told_{};
  std::uint64_t sequence_ = 0;
};

TEST(segments_arrive_as_they_were_sent) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) Sender(seed).run();
}

// Garbage where a segment was expected is judged as anywhere else.
TEST(garbage_where_a_segment_was_expected_is_found) {
  RawPeer peer;
  for (std::uint64_t sequence = 1; sequence <= 5; ++sequence) {
    peer.send(RawPeer::data(1, 20'000, sequence));
  }
  peer.poll(2);
  FrameHeader header = RawPeer::data(1, 20'000, 6);
  peer.finish(&header);
  header.check ^= 1;
  peer.send_finished(header);
  peer.poll();
  CHECK(peer.link().state() == LinkState::kLost, "it was taken");
  CHECK(peer.link().reason().find("check") != std::string::npos, "%s",
        peer.link().reason().c_str());
  RecvChannel& channel = peer.link().recv_channel(1);
  for (std::uint64_t sequence = 1; sequence <= 5; ++sequence, channel.release()) {
    CHECK(channel.peek() != nullptr && channel.peek()->header.sequence == sequence,
          "what came before is lost");
  }
}

}  // namespace
}  // namespace pycoll::transport

RUN_TESTS()
