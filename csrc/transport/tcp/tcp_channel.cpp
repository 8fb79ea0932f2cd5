#include "transport/tcp/tcp_channel.h"

#include <cstring>

#include "base/assert.h"
#include "transport/tcp/tcp_stream.h"

namespace pycoll::transport {

std::byte* StagingSlots::at(std::uint32_t slot_buffer) {
  if (memory_ == nullptr) {
    memory_.reset(new (kAlignment) std::byte[kStride * kTcpDepth]);
  }
  return memory_.get() + kStride * slot_buffer + kFront;
}

std::byte* TcpSendChannel::reserve(std::size_t bytes) {
  PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "segment of %zu bytes, at most %zu", bytes,
                kSegmentBytesMax);
  if (full()) return nullptr;
  reserved_bytes_ = bytes;
  return slots_.at(committed_ % kTcpDepth);
}

void TcpSendChannel::commit(const SegmentHeader& header) {
  PYCOLL_ASSERT(reserved_bytes_ == header.bytes, "commit of %u bytes, reserved %zu", header.bytes,
                reserved_bytes_);
  reserved_bytes_ = kNothing;
  submit(header, slots_.at(committed_ % kTcpDepth));
}

bool TcpSendChannel::hand_over(const SegmentHeader& header, const std::byte* data) {
  PYCOLL_ASSERT(header.bytes <= kSegmentBytesMax, "segment of %u bytes, at most %zu", header.bytes,
                kSegmentBytesMax);
  if (full()) return false;
  reserved_bytes_ = kNothing;
  submit(header, data);
  return true;
}

bool TcpSendChannel::reads(const std::byte* data, std::size_t bytes) {
  for (std::uint32_t segment = written_.before(); segment != committed_; ++segment) {
    if (written_.has(segment)) continue;
    const Segment& pending = at(segment);
    if (pending.data < data + bytes && data < pending.data + pending.header.bytes) return true;
  }
  return false;
}

void TcpSendChannel::submit(const SegmentHeader& header, const std::byte* data) {
  segments_[committed_ % kTcpDepth] = {header, data};
  const std::uint32_t segment = committed_++;
  stream_for(header.bytes).submit(*this, segment);
}

TcpStream& TcpSendChannel::stream_for(std::size_t bytes) {
  if (!streams_.striped || bytes < kStripedBytesMin) return streams_.home(number_);
  return *streams_.all[(number_ + striped_++) % streams_.all.size()];
}

bool TcpSendChannel::accept_released(std::uint8_t released) {
  const auto more = static_cast<std::uint8_t>(released - static_cast<std::uint8_t>(released_));
  if (more > written_.before() - released_) return false;
  released_ += more;
  return true;
}

void TcpSendChannel::let_go() {
  for (std::uint32_t segment = written_.before(); segment != committed_; ++segment) {
    if (written_.has(segment)) continue;
    Segment& pending = segments_[segment % kTcpDepth];
    std::byte* own = slots_.at(segment % kTcpDepth);
    if (pending.data == own || pending.header.bytes == 0) continue;
    std::memcpy(own, pending.data, pending.header.bytes);
    pending.data = own;
  }
}

const Segment* TcpRecvChannel::peek() {
  if (received_.before() == released_) return nullptr;
  oldest_.header = headers_[released_ % kTcpDepth];
  const std::uint8_t slot_buffer = slot_buffers_[released_ % kTcpDepth];
  oldest_.data = oldest_.header.bytes == 0 ? nullptr : slots_.at(slot_buffer);
  return &oldest_;
}

void TcpRecvChannel::release() {
  PYCOLL_ASSERT(received_.before() != released_, "release without a segment, %u released so far",
                released_);
  begun_[released_ % kTcpDepth] = false;
  free_.give_back(slot_buffers_[released_ % kTcpDepth]);
  ++released_;
  if (!credit_due()) return;
  // While more segments wait here, the caller will release again soon: two releases cost one frame.
  const bool now = released_ - announced_ >= kManyReleases || received_.before() == released_;
  streams_.home(number_).credit_due(now);
}

std::byte* TcpRecvChannel::begin(const SegmentHeader& header, std::uint16_t segment) {
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

void TcpRecvChannel::complete(std::uint16_t segment) {
  received_.add(number_of(segment));
  // The sender may just have used its last credit while some releases are unannounced.
  if (credit_due()) streams_.home(number_).credit_due(false);
}

std::uint8_t TcpRecvChannel::announce() {
  announced_ = released_;
  return static_cast<std::uint8_t>(announced_);
}

bool TcpRecvChannel::credit_due() const {
  const std::uint32_t untold = released_ - announced_;
  const bool sender_is_full = received_.before() - announced_ == kTcpDepth;
  return untold >= kManyReleases || (untold > 0 && sender_is_full);
}

TcpSendChannel& TcpChannels::send(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  auto& channel = send_[number];
  if (channel == nullptr) channel = std::make_unique<TcpSendChannel>(number, streams);
  return *channel;
}

TcpRecvChannel& TcpChannels::recv(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  auto& channel = recv_[number];
  if (channel == nullptr) channel = std::make_unique<TcpRecvChannel>(number, streams);
  return *channel;
}

void TcpChannels::let_go() {
  for (const auto& channel : send_) {
    if (channel != nullptr) channel->let_go();
  }
}

}  // namespace pycoll::transport
