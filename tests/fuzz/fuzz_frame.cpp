// Feeds a TCP link what a peer could send. The link must stay inside its memory and end in a state
// that its contract knows; segments that appear must be readable to their last byte.
//
// Input: one byte of choices, then the stream. Choices: bit 0: frame headers get their magic,
// numbers and check put right, so that the fuzzer reaches what lies behind them, and the number of
// a segment counts from the one whose turn it is; bits 1-2: sockets -
// 1; bit 3: segments are released; bit 4: rank 0 sends too; bits 5-7: size of the pieces.
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "transport/tcp/tcp.h"

namespace {

using namespace pycoll;
using namespace pycoll::transport;

constexpr std::uint8_t kRepair = 1;
constexpr std::uint8_t kRelease = 8;
constexpr std::uint8_t kSend = 16;

// Every header of the stream, which `look` may change; payload lengths are believed.
template <typename Look>
void walk(std::vector<std::uint8_t>* stream, Look look) {
  for (std::size_t at = 0; at + sizeof(FrameHeader) <= stream->size();) {
    FrameHeader header;
    std::memcpy(&header, stream->data() + at, sizeof(header));
    look(&header);
    std::memcpy(stream->data() + at, &header, sizeof(header));
    at += sizeof(header) + std::min<std::size_t>(header.bytes, stream->size());
  }
}

void repair(std::vector<std::uint8_t>* stream) {
  std::uint32_t number = 0;
  std::uint16_t segments[kChannelsMax] = {};
  walk(stream, [&](FrameHeader* header) {
    std::copy(std::begin(kFrameMagic), std::end(kFrameMagic), header->magic.begin());
    header->version = kFrameVersion;
    header->number = number++;
    if (header->type == FrameType::kData && header->channel < kChannelsMax) {
      header->segment = static_cast<std::uint16_t>(header->segment + segments[header->channel]++);
    }
    header->check = frame_check(*header);
  });
}

// Whether one of the stream's frames is a goodbye. Behind it nothing is read any more, while the
// link waits for that of the other sockets.
bool says_goodbye(std::vector<std::uint8_t> stream) {
  bool said = false;
  walk(&stream, [&](FrameHeader* header) { said |= header->type == FrameType::kGoodbye; });
  return said;
}

class Harness {
 public:
  explicit Harness(std::uint8_t choices) : choices_(choices) {
    std::vector<UniqueFd> near;
    for (int i = 0; i <= (choices >> 1 & 3); ++i) {
      int fds[2];
      PYCOLL_ASSERT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "no sockets");
      near.emplace_back(fds[0]);
      far_.emplace_back(fds[1]);
    }
    const Status status = transport_.attach(1, std::move(near), "fuzz");
    PYCOLL_ASSERT(status.ok(), "%s", status.message().c_str());
  }

  void run(const std::vector<std::uint8_t>& stream) {
    const std::size_t piece = std::size_t{1} << 2 * (choices_ >> 5) << 3;
    int refusals = 0;  // one after the other
    for (std::size_t at = 0; at < stream.size() && open() && refusals < kRefusalsMax;) {
      const std::size_t wanted = std::min(piece, stream.size() - at);
      const ssize_t sent =
          ::send(far_[0].get(), stream.data() + at, wanted, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent > 0) at += static_cast<std::size_t>(sent);
      refusals = sent > 0 ? 0 : refusals + 1;
      turn();
    }
    PYCOLL_ASSERT(refusals < kRefusalsMax || says_goodbye(stream), "an open link reads nothing");
    far_.clear();
    for (int i = 0; i < 64 && open(); ++i) turn();
    PYCOLL_ASSERT(!open(), "an end of file was not seen");
    PYCOLL_ASSERT(link().state() == LinkState::kClosed || !link().reason().empty(), "no reason");
    choices_ |= kRelease;
    turn();
  }

 private:
  static constexpr int kRefusalsMax = 64;

  Link& link() { return *transport_.link(1); }
  bool open() { return link().state() == LinkState::kOpen; }

  void turn() {
    transport_.poll();
    for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
      if ((choices_ & kSend) != 0) {
        // A full channel takes nothing.
        (void)link().send_channel(number).hand_over({1, 2, sizeof(memory_), 3}, memory_);
      }
      RecvChannel& channel = link().recv_channel(number);
      for (std::uint32_t i = 0; i <= kTcpDepth; ++i) {
        const Segment* segment = channel.peek();
        if (segment == nullptr) break;
        PYCOLL_ASSERT(i < kTcpDepth, "more segments than the channel holds");
        look_at(*segment);
        if ((choices_ & kRelease) == 0) break;
        channel.release();
      }
    }
    const Notice notice = link().newest();
    PYCOLL_ASSERT(std::memchr(notice.detail, 0, sizeof(notice.detail)) != nullptr, "no end");
  }

  void look_at(const Segment& segment) {
    PYCOLL_ASSERT(segment.header.bytes <= kSegmentBytesMax, "%u bytes", segment.header.bytes);
    for (std::uint32_t i = 0; i < segment.header.bytes; i += 512) {
      sink_ = sink_ + static_cast<unsigned>(segment.data[i]);
    }
    if (segment.header.bytes > 0) {
      sink_ = sink_ + static_cast<unsigned>(segment.data[segment.header.bytes - 1]);
    }
  }

  std::uint8_t choices_;
  std::byte memory_[600] = {};
  std::vector<UniqueFd> far_;
  volatile unsigned sink_ = 0;
  TcpTransport transport_{0, 2};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  const std::uint8_t choices = data[0];
  std::vector<std::uint8_t> stream(data + 1, data + bytes);
  if ((choices & kRepair) != 0) repair(&stream);
  Harness harness(choices);
  harness.run(stream);
  return 0;
}
