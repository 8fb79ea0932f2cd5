#include "transport/tcp/tcp_channel.h"

#include "base/assert.h"

namespace pycoll::transport {

std::byte* TcpSendChannel::reserve(std::size_t bytes) {
  PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "segment of %zu bytes, at most %zu", bytes,
                kSegmentBytesMax);
  if (segments_.full()) return nullptr;
  reserved_bytes_ = bytes;
  return segments_.next_slot();
}

void TcpSendChannel::commit(const SegmentHeader& header) {
  PYCOLL_ASSERT(reserved_bytes_ == header.bytes, "commit of %u bytes, reserved %zu", header.bytes,
                reserved_bytes_);
  reserved_bytes_ = kNothing;
  submit(header, segments_.next_slot());
}

bool TcpSendChannel::hand_over(const SegmentHeader& header, const std::byte* data) {
  PYCOLL_ASSERT(header.bytes <= kSegmentBytesMax, "segment of %u bytes, at most %zu", header.bytes,
                kSegmentBytesMax);
  if (segments_.full()) return false;
  reserved_bytes_ = kNothing;
  submit(header, data);
  return true;
}

void TcpSendChannel::submit(const SegmentHeader& header, const std::byte* data) {
  const std::uint32_t segment = segments_.add(header, data);
  stream_for(header.bytes).submit(segments_, segment);
}

TcpStream& TcpSendChannel::stream_for(std::size_t bytes) {
  const std::uint32_t number = segments_.channel();
  if (!streams_.striped || bytes < kStripedBytesMin) return streams_.home(number);
  return *streams_.all[(number + striped_++) % streams_.all.size()];
}

void TcpRecvChannel::release() {
  segments_.release();
  if (!segments_.is_credit_due()) return;
  streams_.home(number_).credit_due(segments_.is_credit_urgent());
}

}  // namespace pycoll::transport
