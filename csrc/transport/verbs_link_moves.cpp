// What a link posts, and what it makes of what arrives.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "base/assert.h"
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
  if (!failure_.empty()) return false;
  bool moved = false;
  while (has_room() && post_one()) moved = true;
  for (Rail& rail : rails_) rail.queue().ring();
  for (Rail& rail : rails_) {
    const int error = rail.queue().error();
    if (error == 0) continue;
    rail.broken = true;
    fail(rail.device().refused("cannot send to " + name_, error).message());
    return true;
  }
  return moved;
}

// On every rail: then each kind of message finds room wherever it belongs.
bool VerbsLink::has_room() {
  return std::all_of(rails_.begin(), rails_.end(),
                     [](Rail& rail) { return rail.queue().has_room(); });
}

// Notices first, since they are rare and tell of failures; goodbyes behind everything. The first
// rail is the home of what belongs to no channel.
bool VerbsLink::post_one() {
  Rail& home = rails_.front();
  const bool final = outgoing_notice_.failure != 0;
  if (notice_waits_ && (final || (!notice_unread_ && home.done(notice_free_at_)))) {
    post_notice(home, final ? NoticePlace::kFinal : NoticePlace::kNewest);
  } else if (notice_seen_due_) {
    notice_seen_due_ = false;
    (void)home.queue().send({}, {Kind::kNoticeSeen, 0, 0});
  } else if (line_count_ != 0) {
    VerbsSendChannel& channel = sends_[line_[line_begin_]];
    line_begin_ = (line_begin_ + 1) % kLineMax;
    --line_count_;
    post_segment(channel);
  } else if (credits_due_ != 0) {
    post_credit(static_cast<std::uint32_t>(__builtin_ctz(credits_due_)));
  } else if (goodbye_ == Goodbye::kWanted) {
    post_goodbyes();
  } else {
    return false;
  }
  return true;
}

// Header and payload are one message, which one completion tells of; only a payload that goes
// somewhere else than behind its header is a message ahead of it. What is like the segment before
// goes without a header, which would take a packet of its own behind a payload of whole ones.
void VerbsLink::post_segment(VerbsSendChannel& channel) {
  const std::uint32_t segment = channel.next();
  Rail& rail = rails_[rail_of_segment(channel.number(), segment, rail_count_)];
  const std::size_t slot = rail.slot(channel.number(), segment);
  auto* header = reinterpret_cast<SlotHeader*>(rail.outgoing(slot + kHeaderAt));
  const std::size_t bytes = header->header.bytes;
  const VerbsSendChannel::Course course = channel.course();
  const bool placed = course.to != Passage::kRoom;
  const bool alike = !placed && header->header == rail.last_sent && !owes_credits(rail);
  rail.last_sent = header->header;
  if (!alike) write_credits(rail, header);
  const Kind kind = placed ? Kind::kPlaced : alike ? Kind::kAlike : Kind::kSegment;
  const Immediate immediate{kind, static_cast<std::uint8_t>(channel.number()),
                            static_cast<std::uint16_t>(segment)};
  const std::array<Piece, 2> pieces = {
      rail.piece(slot + kHeaderAt, sizeof(SlotHeader)),
      payload_of(course, rail, rail.piece(slot + kPayloadAt, bytes))};
  Queue& queue = rail.queue();
  if (placed && bytes != 0) {
    channel.posted(queue.send_behind(pieces[1], pieces[0], immediate));
  } else {
    channel.posted(queue.send(std::span(pieces).subspan(alike ? 1 : 0), immediate));
  }
}

bool VerbsLink::carries_credits(const Rail& rail, std::uint32_t number) const {
  return rail_of_credits(number, rail_count_) == rail.index();
}

bool VerbsLink::owes_credits(const Rail& rail) const {
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    if ((credits_due_ >> number & 1u) != 0 && carries_credits(rail, number)) return true;
  }
  return false;
}

void VerbsLink::write_credits(const Rail& rail, SlotHeader* header) {
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    const bool here = carries_credits(rail, number);
    header->released[number] = here ? static_cast<std::uint8_t>(recvs_[number].announce()) : 0;
    if (here) credits_due_ &= ~(1u << number);
  }
}

// From its slot to that of the peer, unless its course says otherwise.
Piece VerbsLink::payload_of(const VerbsSendChannel::Course& course, const Rail& rail,
                            const Piece& in_slot) const {
  Piece made = in_slot;
  if (course.source != nullptr) {
    made.data = course.source;
    made.key = course.key;
    made.by_device = course.in_region;
  }
  if (course.to != Passage::kRoom) {
    PYCOLL_ASSERT(course.to <= accepted_.bytes && made.bytes <= accepted_.bytes - course.to,
                  "%u bytes to %llu of a grant of %llu", made.bytes,
                  static_cast<unsigned long long>(course.to),
                  static_cast<unsigned long long>(accepted_.bytes));
    made.target = {accepted_.address + course.to, accepted_.rkeys[rail.index()]};
  }
  return made;
}

void VerbsLink::post_credit(std::uint32_t number) {
  credits_due_ &= ~(1u << number);
  const Immediate immediate{Kind::kCredit, static_cast<std::uint8_t>(number),
                            static_cast<std::uint16_t>(recvs_[number].announce())};
  (void)rails_[rail_of_credits(number, rail_count_)].queue().send({}, immediate);
}

void VerbsLink::post_notice(Rail& rail, NoticePlace place) {
  const std::size_t offset = notice_offset(place);
  std::memcpy(rail.outgoing(offset), &outgoing_notice_, sizeof(Notice));
  const Immediate immediate{Kind::kNotice, static_cast<std::uint8_t>(place), 0};
  const Piece piece = rail.piece(offset, sizeof(Notice));
  const std::uint64_t free_at = rail.queue().send({&piece, 1}, immediate);
  notice_waits_ = false;
  if (place == NoticePlace::kFinal) return;
  notice_free_at_ = free_at;
  notice_unread_ = true;
}

// One rail is broken; over another one the peer may still hear why this rank gives up.
void VerbsLink::post_last_notice() {
  if (!connected_ || outgoing_notice_.failure == 0) return;
  for (Rail& rail : rails_) {
    if (rail.broken || rail.ended || !rail.queue().has_room()) continue;
    post_notice(rail, NoticePlace::kFinal);
    rail.queue().ring();
    return;
  }
}

void VerbsLink::post_goodbyes() {
  goodbye_ = Goodbye::kPosted;
  for (Rail& rail : rails_) {
    rail.goodbye_done_at = rail.queue().send_last({Kind::kGoodbye, 0, 0});
  }
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
  if (state_ != LinkState::kOpen || !connected_ || goodbye_heard_) return true;
  return goodbye_ == Goodbye::kPosted &&
         std::all_of(rails_.begin(), rails_.end(),
                     [](const Rail& rail) { return rail.done(rail.goodbye_done_at); });
}

// --- input

bool VerbsLink::received(std::uint32_t index, std::uint32_t immediate, std::uint32_t bytes) {
  Rail& rail = rails_[index];
  rail.queue().received();
  if (state_ != LinkState::kOpen || goodbye_heard_) return false;
  if (rail.ended) return malformed("something follows its goodbye");
  const Immediate what = Immediate::of(immediate);
  switch (what.kind) {
    case Kind::kSegment:
    case Kind::kPlaced:
    case Kind::kAlike:
      return receive_segment(rail, what, bytes);
    case Kind::kCredit:
      return receive_credit(rail, what);
    case Kind::kNotice:
      return receive_notice(rail, what);
    case Kind::kNoticeSeen:
      notice_unread_ = false;
      return false;
    case Kind::kGoodbye:
      return receive_goodbye(rail);
  }
  return malformed("kind " + std::to_string(static_cast<int>(what.kind)));
}

// Copies the header before looking at it, since the peer could still change the original.
bool VerbsLink::receive_segment(Rail& rail, Immediate what, std::uint32_t bytes) {
  std::uint32_t segment = 0;
  if (what.which >= kChannelsMax || !recvs_[what.which].expects(what.number, &segment) ||
      rail_of_segment(what.which, segment, rail_count_) != rail.index()) {
    return malformed("segment " + std::to_string(what.number) + " of channel " +
                     std::to_string(what.which) + " was not expected on rail " +
                     std::to_string(rail.index()));
  }
  VerbsRecvChannel& channel = recvs_[what.which];
  SlotHeader arrived{.header = rail.last_received, .released = {}};
  const bool headed = what.kind != Kind::kAlike;
  if (headed) {
    const std::size_t slot = rail.slot(what.which, segment);
    std::memcpy(&arrived, rail.incoming(slot + kHeaderAt), sizeof(arrived));
  }
  const std::size_t payload = arrived.header.bytes;
  const bool placed = what.kind == Kind::kPlaced;
  if (placed && !granted_) return malformed("a payload was placed where nothing is granted");
  // What the message has besides a payload that was placed before it.
  const std::size_t carried = (headed ? sizeof(arrived) : 0) + (placed ? 0 : payload);
  if (payload > kSegmentBytesMax || bytes != carried) {
    return malformed("a message of " + std::to_string(bytes) + " bytes says " +
                     std::to_string(payload) + " bytes of payload");
  }
  if (headed && !accept_released(rail, arrived)) return true;
  rail.last_received = arrived.header;
  channel.received(segment, arrived.header, placed);
  // A release that came just before may have become due: now its sender is known to be full.
  if (channel.credit_due()) credit_due(what.which, false);
  return true;
}

// False if the link is lost over them.
bool VerbsLink::accept_released(const Rail& rail, const SlotHeader& arrived) {
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    if (!carries_credits(rail, number)) continue;
    if (!sends_[number].accept_released(arrived.released[number], 8)) {
      return !malformed("channel " + std::to_string(number) + " released more than was sent");
    }
  }
  return true;
}

bool VerbsLink::receive_credit(const Rail& rail, Immediate what) {
  if (what.which >= kChannelsMax || !carries_credits(rail, what.which)) {
    return malformed("credit of channel " + std::to_string(what.which) +
                     " was not expected on rail " + std::to_string(rail.index()));
  }
  if (!sends_[what.which].accept_released(what.number, 16)) {
    return malformed("channel " + std::to_string(what.which) + " released more than was sent");
  }
  return true;
}

bool VerbsLink::receive_notice(const Rail& rail, Immediate what) {
  if (what.which > static_cast<std::uint8_t>(NoticePlace::kFinal)) {
    return malformed("notice in place " + std::to_string(what.which));
  }
  const auto place = static_cast<NoticePlace>(what.which);
  ++notices_received_;
  if (newest_.failure == 0) {
    std::memcpy(&newest_, rail.incoming(notice_offset(place)), sizeof(newest_));
    newest_.detail[sizeof(newest_.detail) - 1] = '\0';
  }
  if (place == NoticePlace::kNewest) {
    notice_seen_due_ = true;
    (void)flush();
  }
  return true;
}

// With the last one the peer needs nothing more of us, so that devices may drop what they still
// repeat. Memory of users that they read until then would keep their operations from ending on a
// closed link.
bool VerbsLink::receive_goodbye(Rail& rail) {
  rail.ended = true;
  if (!std::all_of(rails_.begin(), rails_.end(), [](const Rail& one) { return one.ended; })) {
    return false;
  }
  if (!reads_users()) {
    end(LinkState::kClosed, "");
    return true;
  }
  goodbye_heard_ = true;
  grace_ends_ = silence_ends_ = kForever;
  drop_output();
  for (Rail& one : rails_) one.queue().stop();
  return false;
}

bool VerbsLink::malformed(const std::string& what) {
  fail("malformed message from " + name_ + ": " + what);
  return true;
}

}  // namespace pycoll::transport::verbs
