#include "transport/verbs/link/verbs_link.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "base/assert.h"
#include "transport/tcp/tcp_socket.h"

namespace pycoll::transport::verbs {

VerbsLink::VerbsLink(const std::vector<OpenPort*>& ports, int peer)
    : peer_(peer),
      rail_count_(static_cast<std::uint32_t>(ports.size())),
      sends_(*this),
      grants_(rails, name_, peer),
      peer_watch_(rails, name_) {
  rails.reserve(ports.size());
  for (OpenPort* port : ports) {
    rails.emplace_back(*port, peer, static_cast<std::uint32_t>(rails.size()), rail_count_);
  }
  recvs_.reserve(kChannelsMax);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    recvs_.emplace_back(number, static_cast<ChannelOwner&>(*this));
  }
}

Status VerbsLink::prepare(std::string* address) {
  std::string all;
  for (Rail& rail : rails) {
    PeerAddress own;
    if (Status status = rail.open(&own); !status.ok()) return status;
    all.append(reinterpret_cast<const char*>(&own), sizeof(own));
  }
  *address = std::move(all);
  return {};
}

bool VerbsLink::accept_address(const std::string& text,
                               std::array<PeerAddress, kRailsMax>* peers) const {
  if (text.size() != rails.size() * sizeof(PeerAddress)) return false;
  std::memcpy(peers->data(), text.data(), text.size());
  return std::all_of(rails.begin(), rails.end(),
                     [&](const Rail& rail) { return rail.accepts((*peers)[rail.index()]); });
}

Status VerbsLink::connect(const std::string& address, UniqueFd liveness, std::string name) {
  name_ = std::move(name);
  std::array<PeerAddress, kRailsMax> peers;
  if (!accept_address(address, &peers)) {
    std::string ports;
    for (const Rail& rail : rails) ports += (ports.empty() ? "" : ", ") + rail.device().name();
    return Status::error(Code::kInvalidArgument,
                         "verbs: " + std::to_string(address.size()) + " bytes from " + name_ +
                             " are no address of this pycoll version for " + ports +
                             "; run the same version on every rank, and InfiniBand or RoCE on all",
                         {peer_});
  }
  if (Status status = prepare_socket(liveness.get()); !status.ok()) return status;
  for (Rail& rail : rails) {
    if (Status status = rail.queue().connect(peers[rail.index()], name_); !status.ok()) {
      return status;
    }
  }
  peer_watch_.begin(std::move(liveness));
  connected_ = true;
  return {};
}

SendChannel& VerbsLink::send_channel(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  return sends_[number];
}

RecvChannel& VerbsLink::recv_channel(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  return recvs_[number];
}

void VerbsLink::post(const Notice& notice) {
  if (!notices_.set(notice)) return;
  if (state_ == LinkState::kLost) {
    post_last_notice();
  } else {
    (void)flush();
  }
}

void VerbsLink::submit(std::uint32_t number) {
  sends_.enqueue(number);
  (void)flush();
}

void VerbsLink::credit_due(std::uint32_t number, bool now) {
  if (state_ != LinkState::kOpen) return;
  credits_due_ |= 1u << number;
  if (now) (void)flush();
}

bool VerbsLink::uses(const Device& device) const {
  return std::any_of(rails.begin(), rails.end(),
                     [&](const Rail& rail) { return &rail.device() == &device; });
}

void VerbsLink::fail(std::string reason) { end(LinkState::kLost, std::move(reason)); }

void VerbsLink::end(LinkState state, std::string reason) {
  if (state_ != LinkState::kOpen) return;
  state_ = state;
  reason_ = std::move(reason);
  peer_watch_.retire();
  drop_output();
}

void VerbsLink::drop_output() {
  credits_due_ = 0;
  notices_.drop();
  sends_.abandon();
}

void VerbsLink::stop() {
  for (Rail& rail : rails) {
    if (!sends_.reads_over(rail)) continue;
    fail(peer_watch_.reason_to_stop(rail.device()));
    rail.broken = true;
    rail.queue().stop();
  }
}

// The messages that a link posts, and its handling of messages that arrive.

// --- output

bool VerbsLink::has_output() const {
  return sends_.has_waiting() || credits_due_ != 0 || notices_.is_due() ||
         notices_.owes_receipt() || goodbye_ == Goodbye::kWanted;
}

bool VerbsLink::flush() {
  if (state_ != LinkState::kOpen || !connected_ || goodbye_received_) return false;
  if (peer_watch_.has_failed()) return false;
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
  if (notices_.can_send(home)) {
    notices_.send(home);
  } else if (notices_.owes_receipt()) {
    notices_.send_receipt(home);
  } else if (sends_.has_waiting()) {
    post_segment(sends_.dequeue());
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
// rail is sent without a header. After a payload of whole packets the header would take another
// packet.
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
    made.target = grants_.target(route.to, made.bytes, rail);
  }
  return made;
}

void VerbsLink::post_credit(std::uint32_t number) {
  credits_due_ &= ~(1u << number);
  const Immediate immediate{Kind::kCredit, static_cast<std::uint8_t>(number),
                            static_cast<std::uint16_t>(recvs_[number].announce())};
  (void)rails[rail_of_credits(number, rail_count_)].queue().send({}, immediate);
}

// Sends the failure of this rank over a rail that is not broken, so that the peer learns the
// reason.
void VerbsLink::post_last_notice() {
  if (!connected_ || !notices_.is_final()) return;
  for (Rail& rail : rails) {
    if (rail.broken || rail.ended || !rail.queue().has_space()) continue;
    notices_.send(rail);
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
  notices_.close();
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

bool VerbsLink::take(const ibv_wc& completion) {
  Rail& rail = rails[Rail::index_of(Queue::number_of(completion.wr_id))];
  const bool receives = Queue::is_receive(completion.wr_id);
  if (completion.status == IBV_WC_SUCCESS) {
    return receives ? receive(rail, Immediate::of(ntohl(completion.imm_data)), completion.byte_len)
                    : note_sent(rail, completion.wr_id);
  }
  const bool open = state_ == LinkState::kOpen;
  rail.broken = true;
  peer_watch_.note_failure(rail.device(), completion.status);
  if (!receives) (void)note_sent(rail, completion.wr_id);
  return open;
}

bool VerbsLink::note_sent(Rail& rail, std::uint64_t id) {
  rail.queue().note_send(id);
  peer_watch_.note_completion();
  if (goodbye_received_ && state_ == LinkState::kOpen && !sends_.reads_user_memory()) {
    end(LinkState::kClosed, "");
    return true;
  }
  return std::exchange(has_waiter, false);
}

bool VerbsLink::receive(Rail& rail, Immediate what, std::uint32_t bytes) {
  rail.queue().note_receive();
  if (state_ != LinkState::kOpen || goodbye_received_) return false;
  if (rail.ended) return fail_malformed("something follows its goodbye");
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
      notices_.note_read();
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
  if (direct && !grants_.has_granted())
    return fail_malformed("a payload was placed where nothing is granted");
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
  notices_.accept(rail, place);
  if (place == NoticePlace::kNewest) (void)flush();
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
  if (!sends_.reads_user_memory()) {
    end(LinkState::kClosed, "");
    return true;
  }
  goodbye_received_ = true;
  peer_watch_.retire();
  drop_output();
  for (Rail& one : rails) one.queue().stop();
  return false;
}

bool VerbsLink::fail_malformed(const std::string& what) {
  fail("malformed message from " + name_ + ": " + what);
  return true;
}

}  // namespace pycoll::transport::verbs
