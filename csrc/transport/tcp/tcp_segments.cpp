#include "transport/tcp/tcp_segments.h"

#include <cstring>

#include "base/assert.h"

namespace pycoll::transport {

std::byte* StagingSlots::at(std::uint32_t slot_buffer) {
  if (memory_ == nullptr) {
    memory_.reset(new (kAlignment) std::byte[kStride * kTcpDepth]);
  }
  return memory_.get() + kStride * slot_buffer + kFront;
}

bool OutgoingSegments::reads(const std::byte* data, std::size_t bytes) const {
  for (std::uint32_t segment = written_.before(); segment != committed_; ++segment) {
    if (written_.has(segment)) continue;
    const Segment& pending = at(segment);
    if (pending.data < data + bytes && data < pending.data + pending.header.bytes) return true;
  }
  return false;
}

bool OutgoingSegments::accept_released(std::uint8_t released) {
  const auto more = static_cast<std::uint8_t>(released - static_cast<std::uint8_t>(released_));
  if (more > written_.before() - released_) return false;
  released_ += more;
  return true;
}

void OutgoingSegments::let_go() {
  for (std::uint32_t segment = written_.before(); segment != committed_; ++segment) {
    if (written_.has(segment)) continue;
    Segment& pending = segments_[segment % kTcpDepth];
    std::byte* own = slots_.at(segment % kTcpDepth);
    if (pending.data == own || pending.header.bytes == 0) continue;
    std::memcpy(own, pending.data, pending.header.bytes);
    pending.data = own;
  }
}

const Segment* IncomingSegments::oldest() {
  if (received_.before() == released_) return nullptr;
  oldest_.header = headers_[released_ % kTcpDepth];
  const std::uint8_t slot_buffer = slot_buffers_[released_ % kTcpDepth];
  oldest_.data = oldest_.header.bytes == 0 ? nullptr : slots_.at(slot_buffer);
  return &oldest_;
}

void IncomingSegments::release() {
  PYCOLL_ASSERT(received_.before() != released_, "release without a segment, %u released so far",
                released_);
  begun_[released_ % kTcpDepth] = false;
  free_.give_back(slot_buffers_[released_ % kTcpDepth]);
  ++released_;
}

std::byte* IncomingSegments::begin(const SegmentHeader& header, std::uint16_t segment) {
  const std::uint32_t number = number_of(segment);
  if (number - announced_ >= kTcpDepth || number - announced_ < released_ - announced_ ||
      begun_[number % kTcpDepth]) {
    return nullptr;
  }
  begun_[number % kTcpDepth] = true;
  headers_[number % kTcpDepth] = header;
  slot_buffers_[number % kTcpDepth] = free_.take();
  return slots_.at(slot_buffers_[number % kTcpDepth]);
}

std::uint8_t IncomingSegments::announce() {
  announced_ = released_;
  return static_cast<std::uint8_t>(announced_);
}

bool IncomingSegments::is_credit_due() const {
  const std::uint32_t untold = released_ - announced_;
  const bool sender_is_full = received_.before() - announced_ == kTcpDepth;
  return untold >= kManyReleases || (untold > 0 && sender_is_full);
}

OutgoingSegments& LinkSegments::out(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  auto& segments = out_[number];
  if (segments == nullptr) segments = std::make_unique<OutgoingSegments>(number);
  return *segments;
}

IncomingSegments& LinkSegments::in(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  auto& segments = in_[number];
  if (segments == nullptr) segments = std::make_unique<IncomingSegments>();
  return *segments;
}

void LinkSegments::let_go() {
  for (const auto& segments : out_) {
    if (segments != nullptr) segments->let_go();
  }
}

}  // namespace pycoll::transport
