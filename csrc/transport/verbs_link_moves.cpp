// What a link posts, and what it makes of what arrives.
#include <cstring>

#include "transport/verbs_link.h"

namespace pycoll::transport::verbs {

// --- output

bool VerbsLink::has_output() const {
  const bool notice = notice_waits_ && (outgoing_notice_.failure != 0 || !notice_unread_);
  return line_count_ != 0 || credits_due_ != 0 || notice || notice_seen_due_ ||
         goodbye_ == Goodbye::kWanted;
}

bool VerbsLink::flush() {
  if (state_ != LinkState::kOpen || !connected_ || goodbye_heard_) return false;
  bool moved = false;
  while (queue_.has_room() && post_one()) moved = true;
  queue_.ring();
  if (queue_.error() == 0) return moved;
  fail(device_.refused("cannot send to " + name_, queue_.error()).message());
  return true;
}

// Notices first, since they are rare and tell of failures; goodbye behind everything.
bool VerbsLink::post_one() {
  const bool final = outgoing_notice_.failure != 0;
  if (notice_waits_ && (final || (!notice_unread_ && queue_.done(notice_free_at_)))) {
    post_notice(final ? NoticePlace::kFinal : NoticePlace::kNewest);
  } else if (notice_seen_due_) {
    notice_seen_due_ = false;
    tell({Kind::kNoticeSeen, 0, 0});
  } else if (line_count_ != 0) {
    VerbsSendChannel& channel = sends_[line_[line_begin_]];
    line_begin_ = (line_begin_ + 1) % kLineMax;
    --line_count_;
    post_segment(channel);
  } else if (credits_due_ != 0) {
    post_credit(static_cast<std::uint32_t>(__builtin_ctz(credits_due_)));
  } else if (goodbye_ == Goodbye::kWanted) {
    goodbye_ = Goodbye::kPosted;
    goodbye_done_at_ = queue_.send_last({Kind::kGoodbye, 0, 0});
  } else {
    return false;
  }
  return true;
}

Piece VerbsLink::piece(std::size_t offset, std::size_t bytes) const {
  return {outgoing_->at(offset), static_cast<std::uint32_t>(bytes), outgoing_->local_key(), offset};
}

void VerbsLink::tell(Immediate immediate) { (void)queue_.send(nullptr, {}, immediate); }

// What fits into one packet travels with its header. A longer payload goes ahead as a message of
// its own: packets of one message may overtake each other on some networks, messages are complete
// in order.
void VerbsLink::post_segment(VerbsSendChannel& channel) {
  const std::uint32_t segment = channel.next();
  const std::size_t slot = slot_offset(channel.number(), segment);
  auto* header = reinterpret_cast<SlotHeader*>(outgoing_->at(slot + kHeaderAt));
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    header->released[number] = static_cast<std::uint8_t>(recvs_[number].announce());
  }
  credits_due_ = 0;
  const std::size_t bytes = header->header.bytes;
  std::uint32_t key = 0;
  const std::byte* source = channel.source(&key);
  const Immediate immediate{Kind::kSegment, static_cast<std::uint8_t>(channel.number()),
                            static_cast<std::uint16_t>(segment)};
  if (source == nullptr && sizeof(SlotHeader) + bytes <= queue_.packet_bytes()) {
    const Piece whole = piece(slot + kHeaderAt, sizeof(SlotHeader) + bytes);
    channel.posted(queue_.send(nullptr, whole, immediate));
  } else {
    Piece payload = piece(slot + kPayloadAt, bytes);
    if (source != nullptr) {
      payload.data = source;
      payload.key = key;
    }
    channel.posted(queue_.send(&payload, piece(slot + kHeaderAt, sizeof(SlotHeader)), immediate));
  }
}

void VerbsLink::post_credit(std::uint32_t number) {
  credits_due_ &= ~(1u << number);
  tell({Kind::kCredit, static_cast<std::uint8_t>(number),
        static_cast<std::uint16_t>(recvs_[number].announce())});
}

void VerbsLink::post_notice(NoticePlace place) {
  const std::size_t offset = notice_offset(place);
  std::memcpy(outgoing_->at(offset), &outgoing_notice_, sizeof(Notice));
  const Immediate immediate{Kind::kNotice, static_cast<std::uint8_t>(place), 0};
  const std::uint64_t free_at = queue_.send(nullptr, piece(offset, sizeof(Notice)), immediate);
  notice_waits_ = false;
  if (place == NoticePlace::kFinal) return;
  notice_free_at_ = free_at;
  notice_unread_ = true;
}

void VerbsLink::say_goodbye() {
  if (state_ != LinkState::kOpen || !connected_) return;
  if (outgoing_notice_.failure == 0) {
    outgoing_notice_.failure = static_cast<std::uint32_t>(Code::kClosed);
    notice_waits_ = true;
  }
  goodbye_ = Goodbye::kWanted;
  (void)flush();
}

bool VerbsLink::is_told() const {
  return state_ != LinkState::kOpen || !connected_ || goodbye_heard_ ||
         (goodbye_ == Goodbye::kPosted && queue_.done(goodbye_done_at_));
}

// --- input

bool VerbsLink::received(std::uint32_t immediate, std::uint32_t bytes) {
  queue_.received();
  if (state_ != LinkState::kOpen || goodbye_heard_) return false;
  const Immediate what = Immediate::of(immediate);
  switch (what.kind) {
    case Kind::kSegment:
      return receive_segment(what, bytes);
    case Kind::kCredit:
      return receive_credit(what);
    case Kind::kNotice:
      return receive_notice(what);
    case Kind::kNoticeSeen:
      notice_unread_ = false;
      return false;
    case Kind::kGoodbye:
      return receive_goodbye();
  }
  return malformed("kind " + std::to_string(static_cast<int>(what.kind)));
}

// Copies the header before looking at it, since the peer could still change the original.
bool VerbsLink::receive_segment(Immediate what, std::uint32_t bytes) {
  if (what.which >= kChannelsMax || !recvs_[what.which].expects(what.number)) {
    return malformed("segment " + std::to_string(what.number) + " of channel " +
                     std::to_string(what.which) + " was not expected");
  }
  VerbsRecvChannel& channel = recvs_[what.which];
  SlotHeader arrived;
  std::memcpy(&arrived, incoming_->at(slot_offset(what.which, channel.next()) + kHeaderAt),
              sizeof(arrived));
  const std::size_t payload = arrived.header.bytes;
  const bool ahead = bytes == sizeof(arrived);  // the payload came in a message before
  if (payload > kSegmentBytesMax || (!ahead && bytes != sizeof(arrived) + payload)) {
    return malformed("a message of " + std::to_string(bytes) + " bytes says " +
                     std::to_string(payload) + " bytes of payload");
  }
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    if (!sends_[number].accept_released(arrived.released[number], 8)) {
      return malformed("channel " + std::to_string(number) + " released more than was sent");
    }
  }
  channel.received(arrived.header);
  // A release that came just before may have become due: now its sender is known to be full.
  if (channel.credit_due()) credit_due(what.which, false);
  return true;
}

bool VerbsLink::receive_credit(Immediate what) {
  if (what.which >= kChannelsMax || !sends_[what.which].accept_released(what.number, 16)) {
    return malformed("channel " + std::to_string(what.which) + " released more than was sent");
  }
  return true;
}

bool VerbsLink::receive_notice(Immediate what) {
  if (what.which > static_cast<std::uint8_t>(NoticePlace::kFinal)) {
    return malformed("notice in place " + std::to_string(what.which));
  }
  const auto place = static_cast<NoticePlace>(what.which);
  if (newest_.failure == 0) {
    std::memcpy(&newest_, incoming_->at(notice_offset(place)), sizeof(newest_));
    newest_.detail[sizeof(newest_.detail) - 1] = '\0';
  }
  if (place == NoticePlace::kNewest) {
    notice_seen_due_ = true;
    (void)flush();
  }
  return true;
}

// The peer needs nothing more of us, so that the device may drop what it still repeats. Memory of
// users that it reads until then would keep their operations from ending on a closed link.
bool VerbsLink::receive_goodbye() {
  if (!reads_users()) {
    end(LinkState::kClosed, "");
    return true;
  }
  goodbye_heard_ = true;
  drop_output();
  queue_.stop();
  return false;
}

bool VerbsLink::malformed(const std::string& what) {
  fail("malformed message from " + name_ + ": " + what);
  return true;
}

}  // namespace pycoll::transport::verbs
