// Feeds a mailbox the segments of messages that a peer could send. No length that a header claims,
// up to 2^64 - 1 and in sums that wrap, may lead out of memory, and no receive may end as done
// whose message did not come whole.
//
// Input: records of a segment, as it lies in memory: a SegmentHeader, one byte of choices, and as
// many bytes of payload as the header claims or are left. Choices: bit 0: a receive of that tag is
// posted first, for as many bytes as bits 3 to 7 say; bit 1: the header's sequence is put right;
// bit 2: the header's bytes are those of the payload that is there.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "base/assert.h"
#include "engine/operations/mailbox.h"

namespace {

using namespace pycoll;
using namespace pycoll::engine;

constexpr std::uint8_t kPost = 1;
constexpr std::uint8_t kSequence = 2;
constexpr std::uint8_t kBytes = 4;
constexpr int kLengthShift = 3;
constexpr std::uint64_t kLength = 13;

// A channel that holds one segment at a time, in memory of just its length.
class OneSegment final : public transport::RecvChannel {
 public:
  void put(const transport::SegmentHeader& header, const std::uint8_t* data) {
    payload_.resize(header.bytes);
    if (header.bytes != 0) std::memcpy(payload_.data(), data, header.bytes);
    segment_.header = header;
    segment_.data = payload_.data();
    full_ = true;
  }
  const transport::Segment* peek() override { return full_ ? &segment_ : nullptr; }
  void release() override { full_ = false; }

 private:
  std::vector<std::byte> payload_;
  transport::Segment segment_;
  bool full_ = false;
};

struct Posted {
  std::vector<std::byte> memory;
  std::shared_ptr<Operation> operation;
};

class Harness {
 public:
  void run(const std::uint8_t* data, std::size_t bytes) {
    while (bytes > sizeof(transport::SegmentHeader) && !mailbox_.is_broken()) {
      transport::SegmentHeader header;
      std::memcpy(&header, data, sizeof(header));
      const std::uint8_t choices = data[sizeof(header)];
      data += sizeof(header) + 1;
      bytes -= sizeof(header) + 1;
      // A transport has judged this length before, and brings just so many bytes.
      const std::size_t there = std::min<std::size_t>(bytes, transport::kSegmentBytesMax);
      if ((choices & kBytes) != 0 || header.bytes > there) {
        header.bytes = static_cast<std::uint32_t>(std::min<std::size_t>(there, header.bytes));
      }
      if ((choices & kSequence) != 0) header.sequence = messages_ + (arriving_ ? 0 : 1);
      if ((choices & kPost) != 0) post(header.tag, (choices >> kLengthShift) * kLength);
      take(header, data);
      data += header.bytes;
      bytes -= header.bytes;
    }
    mailbox_.fail(Status::error(Code::kClosed, "the end", {1}));
    for (const Posted& one : posted_) PYCOLL_ASSERT(one.operation->done(), "a receive stays open");
  }

 private:
  void post(std::uint32_t tag, std::uint64_t bytes) {
    posted_.push_back({std::vector<std::byte>(bytes), std::make_shared<Operation>()});
    Posted& made = posted_.back();
    mailbox_.post_recv({.kind = MessageRequest::Kind::kRecv,
                        .peer = 1,
                        .tag = tag,
                        .data = {made.memory.data(), made.memory.size()}},
                       made.operation);
  }

  void take(const transport::SegmentHeader& header, const std::uint8_t* data) {
    channel_.put(header, data);
    (void)mailbox_.advance_recvs(channel_, true);
    PYCOLL_ASSERT(channel_.peek() == nullptr, "a segment stays");
    if (mailbox_.is_broken()) return;
    if (!arriving_) {
      ++messages_;
      total_ = header.agreement;
      received_ = 0;
    }
    PYCOLL_ASSERT(header.agreement == total_ && header.bytes <= total_ - received_,
                  "%u bytes behind %llu of %llu", header.bytes,
                  static_cast<unsigned long long>(received_),
                  static_cast<unsigned long long>(total_));
    received_ += header.bytes;
    arriving_ = received_ != total_;
  }

  Mailbox mailbox_{1};
  OneSegment channel_;
  std::vector<Posted> posted_;
  std::uint64_t messages_ = 0;
  std::uint64_t total_ = 0;
  std::uint64_t received_ = 0;
  bool arriving_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  Harness().run(data, bytes);
  return 0;
}
