// The messages that a link posts, and its handling of messages that arrive.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "base/assert.h"
#include "transport/verbs/verbs_link.h"

namespace pycoll::transport::verbs {

// --- output

bool VerbsLink::has_output() const {
  const bool notice = notice_waits_ && (outgoing_notice_.failure != 0 || !notice_unread_);
  return line_count_ != 0 || credits_due_ != 0 || notice || notice_seen_due_ ||
         goodbye_ == Goodbye::kWanted;
}

bool VerbsLink::flush() {
  if (state_ != LinkState::kOpen || !connected_ || goodbye_received_) return false;
  if (!failure_.empty()) return false;
  bool moved = false;
  while (has_space() && post_one()) moved = true;
  for (Rail& rail : rails) rail.queue().ring();
  for (Rail& rail : rails) {
    const int error = rail.queue().error();
    if (error == 0) continue;
    rail.broken = true;
    fail(rail.device().refused("cannot send to " + name_, error).message());
    return true;
  }
  return moved;
}

// Checks every rail, so that any kind of message fits on the rail that it belongs to.
bool VerbsLink::has_space() {
  return std::all_of(rails.begin(), rails.end(),
                     [](Rail& rail) { return rail.queue().has_space(); });
}

// Notices go first, since they are rare and report failures; goodbyes go after everything else. The
// first rail carries the messages that belong to no channel.
bool VerbsLink::post_one() {
  Rail& home = rails.front();
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

// Header and payload are one message with one completion. Only a payload for the peer's region is a
// separate message ahead of the header. A segment with the same header as the previous one on its
// rail is sent without a header, which would take another packet after a payload of whole packets.
void VerbsLink::post_segment(VerbsSendChannel& channel) {
  const std::uint32_t segment = channel.next();
  Rail& rail = rails[rail_of_segment(channel.number(), segment, rail_count_)];
  const std::size_t slot = rail.slot(channel.number(), segment);
  auto* header = reinterpret_cast<SlotHeader*>(rail.outgoing(slot + kHeaderAt));
  const std::size_t bytes = header->header.bytes;
  const VerbsSendChannel::Route route = channel.route();
  const bool direct = route.to != Passage::kSlotBuffer;
  const bool alike = !direct && header->header == rail.last_sent && !owes_credits(rail);
  rail.last_sent = header->header;
  if (!alike) write_credits(rail, header);
  const Kind kind = direct ? Kind::kWrittenDirectly : alike ? Kind::kAlike : Kind::kSegment;
  const Immediate immediate{kind, static_cast<std::uint8_t>(channel.number()),
                            static_cast<std::uint16_t>(segment)};
  const std::array<Piece, 2> pieces = {
      rail.piece(slot + kHeaderAt, sizeof(SlotHeader)),
      payload_of(route, rail, rail.piece(slot + kPayloadAt, bytes))};
  Queue& queue = rail.queue();
  if (direct && bytes != 0) {
    channel.note_posted(queue.send_behind(pieces[1], pieces[0], immediate));
  } else {
    channel.note_posted(queue.send(std::span(pieces).subspan(alike ? 1 : 0), immediate));
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

// The payload goes from its slot to the peer's slot, unless `route` says otherwise.
Piece VerbsLink::payload_of(const VerbsSendChannel::Route& route, const Rail& rail,
                            const Piece& in_slot) const {
  Piece made = in_slot;
  if (route.source != nullptr) {
    made.data = route.source;
    made.key = route.key;
    made.by_device = route.in_region;
  }
  if (route.to != Passage::kSlotBuffer) {
    PYCOLL_ASSERT(route.to <= accepted_.bytes && made.bytes <= accepted_.bytes - route.to,
                  "%u bytes to %llu of a grant of %llu", made.bytes,
                  static_cast<unsigned long long>(route.to),
                  static_cast<unsigned long long>(accepted_.bytes));
    made.target = {accepted_.address + route.to, accepted_.rkeys[rail.index()]};
  }
  return made;
}

void VerbsLink::post_credit(std::uint32_t number) {
  credits_due_ &= ~(1u << number);
  const Immediate immediate{Kind::kCredit, static_cast<std::uint8_t>(number),
                            static_cast<std::uint16_t>(recvs_[number].announce())};
  (void)rails[rail_of_credits(number, rail_count_)].queue().send({}, immediate);
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

// Sends the failure of this rank over a rail that is not broken, so that the peer learns the
// reason.
void VerbsLink::post_last_notice() {
  if (!connected_ || outgoing_notice_.failure == 0) return;
  for (Rail& rail : rails) {
    if (rail.broken || rail.ended || !rail.queue().has_space()) continue;
    post_notice(rail, NoticePlace::kFinal);
    rail.queue().ring();
    return;
  }
}

void VerbsLink::post_goodbyes() {
  goodbye_ = Goodbye::kPosted;
  for (Rail& rail : rails) {
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

bool VerbsLink::goodbye_is_done() const {
  if (state_ != LinkState::kOpen || !connected_ || goodbye_received_) return true;
  return goodbye_ == Goodbye::kPosted &&
         std::all_of(rails.begin(), rails.end(),
                     [](const Rail& rail) { return rail.done(rail.goodbye_done_at); });
}

// --- input

bool VerbsLink::handle_receive(std::uint32_t index, std::uint32_t immediate, std::uint32_t bytes) {
  Rail& rail = rails[index];
  rail.queue().note_receive();
  if (state_ != LinkState::kOpen || goodbye_received_) return false;
  if (rail.ended) return fail_malformed("something follows its goodbye");
  const Immediate what = Immediate::of(immediate);
  switch (what.kind) {
    case Kind::kSegment:
    case Kind::kWrittenDirectly:
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
  return fail_malformed("kind " + std::to_string(static_cast<int>(what.kind)));
}

// Copies the header before checking it, since the peer could still change the original.
bool VerbsLink::receive_segment(Rail& rail, Immediate what, std::uint32_t bytes) {
  std::uint32_t segment = 0;
  if (what.which >= kChannelsMax || !recvs_[what.which].expects(what.number, &segment) ||
      rail_of_segment(what.which, segment, rail_count_) != rail.index()) {
    return fail_malformed("segment " + std::to_string(what.number) + " of channel " +
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
  const bool direct = what.kind == Kind::kWrittenDirectly;
  if (direct && !granted_) return fail_malformed("a payload was placed where nothing is granted");
  // The bytes that the message must have; a payload in the region arrived before it.
  const std::size_t expected = (headed ? sizeof(arrived) : 0) + (direct ? 0 : payload);
  if (payload > kSegmentBytesMax || bytes != expected) {
    return fail_malformed("a message of " + std::to_string(bytes) + " bytes says " +
                          std::to_string(payload) + " bytes of payload");
  }
  if (headed && !accept_released(rail, arrived)) return true;
  rail.last_received = arrived.header;
  channel.note_received(segment, arrived.header, direct);
  // An earlier release may be due now, because this segment shows that the sender has no more
  // credits.
  if (channel.credit_due()) credit_due(what.which, false);
  return true;
}

// Returns false if the counts are invalid and the link is therefore lost.
bool VerbsLink::accept_released(const Rail& rail, const SlotHeader& arrived) {
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    if (!carries_credits(rail, number)) continue;
    if (!sends_[number].accept_released(arrived.released[number], 8)) {
      return !fail_malformed("channel " + std::to_string(number) + " released more than was sent");
    }
  }
  return true;
}

bool VerbsLink::receive_credit(const Rail& rail, Immediate what) {
  if (what.which >= kChannelsMax || !carries_credits(rail, what.which)) {
    return fail_malformed("credit of channel " + std::to_string(what.which) +
                          " was not expected on rail " + std::to_string(rail.index()));
  }
  if (!sends_[what.which].accept_released(what.number, 16)) {
    return fail_malformed("channel " + std::to_string(what.which) + " released more than was sent");
  }
  return true;
}

bool VerbsLink::receive_notice(const Rail& rail, Immediate what) {
  if (what.which > static_cast<std::uint8_t>(NoticePlace::kFinal)) {
    return fail_malformed("notice in place " + std::to_string(what.which));
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

// After the last goodbye the peer needs nothing more from this rank, so devices may drop the
// packets that they still repeat. Otherwise operations could not end on the closed link, because
// the devices would still read user memory.
bool VerbsLink::receive_goodbye(Rail& rail) {
  rail.ended = true;
  if (!std::all_of(rails.begin(), rails.end(), [](const Rail& one) { return one.ended; })) {
    return false;
  }
  if (!reads_user_memory()) {
    end(LinkState::kClosed, "");
    return true;
  }
  goodbye_received_ = true;
  grace_ends_ = silence_ends_ = kForever;
  drop_output();
  for (Rail& one : rails) one.queue().stop();
  return false;
}

bool VerbsLink::fail_malformed(const std::string& what) {
  fail("malformed message from " + name_ + ": " + what);
  return true;
}

}  // namespace pycoll::transport::verbs
