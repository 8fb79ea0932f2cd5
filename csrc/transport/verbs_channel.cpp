#include "transport/verbs_channel.h"

#include "base/assert.h"
#include "transport/verbs_link.h"

namespace pycoll::transport::verbs {

std::byte* VerbsSendChannel::reserve(std::size_t bytes) {
  PYCOLL_ASSERT(bytes <= kSegmentBytesMax, "segment of %zu bytes, at most %zu", bytes,
                kSegmentBytesMax);
  const bool full = committed_ - released_ == kChannelDepth;
  if (full || !link_.is_done(free_at_[committed_ % kChannelDepth])) {
    link_.note_want();
    return nullptr;
  }
  reserved_bytes_ = bytes;
  return link_.outgoing(slot_offset(number_, committed_) + kPayloadAt);
}

void VerbsSendChannel::commit(const SegmentHeader& header) {
  PYCOLL_ASSERT(reserved_bytes_ == header.bytes, "commit of %u bytes, reserved %zu", header.bytes,
                reserved_bytes_);
  reserved_bytes_ = kNothing;
  std::byte* slot = link_.outgoing(slot_offset(number_, committed_));
  reinterpret_cast<SlotHeader*>(slot + kHeaderAt)->header = header;
  ++committed_;
  if (abandoned_) {
    posted_ = committed_;
  } else {
    link_.submit(number_);
  }
}

bool VerbsSendChannel::drained() {
  if (posted_ == committed_) return true;
  link_.note_want();
  return false;
}

void VerbsSendChannel::posted(std::uint64_t position) {
  free_at_[posted_ % kChannelDepth] = position;
  ++posted_;
}

bool VerbsSendChannel::accept_released(std::uint32_t released, int bits) {
  const std::uint32_t more = (released - released_) & ((1u << bits) - 1);
  if (more > posted_ - released_) return false;
  released_ += more;
  return true;
}

void VerbsSendChannel::abandon() {
  abandoned_ = true;
  posted_ = committed_;
}

const Segment* VerbsRecvChannel::peek() {
  if (received_ == released_) return nullptr;
  oldest_.header = headers_[released_ % kChannelDepth];
  oldest_.data = oldest_.header.bytes == 0
                     ? nullptr
                     : link_.incoming(slot_offset(number_, released_) + kPayloadAt);
  return &oldest_;
}

void VerbsRecvChannel::release() {
  PYCOLL_ASSERT(received_ != released_, "release without a segment, %u released so far", released_);
  ++released_;
  if (!credit_due()) return;
  // While more segments wait here the owner will be back at once, and two releases cost one
  // message.
  const bool now = released_ - announced_ >= kManyReleases || received_ == released_;
  link_.credit_due(number_, now);
}

bool VerbsRecvChannel::expects(std::uint16_t number) const {
  return number == static_cast<std::uint16_t>(received_) && received_ - announced_ < kChannelDepth;
}

void VerbsRecvChannel::received(const SegmentHeader& header) {
  headers_[received_ % kChannelDepth] = header;
  ++received_;
}

std::uint32_t VerbsRecvChannel::announce() {
  announced_ = released_;
  return announced_;
}

bool VerbsRecvChannel::credit_due() const {
  const std::uint32_t untold = released_ - announced_;
  const bool sender_is_full = received_ - announced_ == kChannelDepth;
  return untold >= kManyReleases || (untold > 0 && sender_is_full);
}

}  // namespace pycoll::transport::verbs
