#include "transport/verbs/verbs_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "transport/tcp/tcp_socket.h"

namespace pycoll::transport::verbs {

VerbsLink::VerbsLink(const std::vector<OpenPort*>& ports, int peer)
    : peer_(peer), rail_count_(static_cast<std::uint32_t>(ports.size())) {
  rails.reserve(ports.size());
  for (OpenPort* port : ports) {
    rails.emplace_back(*port, peer, static_cast<std::uint32_t>(rails.size()), rail_count_);
  }
  sends_.reserve(kChannelsMax);
  recvs_.reserve(kChannelsMax);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    sends_.emplace_back(number, static_cast<ChannelOwner&>(*this));
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
  liveness_ = std::move(liveness);
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
  if (outgoing_notice_.failure != 0) return;  // a failure is final
  outgoing_notice_ = notice;
  notice_waits_ = true;
  if (state_ == LinkState::kLost) {
    post_last_notice();
  } else {
    (void)flush();
  }
}

std::string VerbsLink::grant(std::uint64_t offset, std::size_t bytes) {
  const Region& region = rails.front().region();
  PYCOLL_ASSERT(region.peers_write && offset <= region.bytes && bytes <= region.bytes - offset,
                "a grant of %zu bytes at %llu", bytes, static_cast<unsigned long long>(offset));
  Grant made;
  made.address = region.address + offset;
  made.bytes = bytes;
  for (const Rail& rail : rails) made.rkeys[rail.index()] = rail.region_keys().rkey;
  granted_ = true;
  return {reinterpret_cast<const char*>(&made), sizeof(made)};
}

Status VerbsLink::accept(const std::string& grant) {
  Grant given;
  if (grant.size() == sizeof(given)) std::memcpy(&given, grant.data(), sizeof(given));
  if (grant.size() != sizeof(given) || given.magic != Grant::kMagic || given.bytes == 0 ||
      given.address + given.bytes < given.bytes) {
    return Status::error(Code::kInvalidArgument,
                         "verbs: " + std::to_string(grant.size()) + " bytes from " + name_ +
                             " are no grant of this pycoll version; run the same on every rank",
                         {peer_});
  }
  accepted_ = given;
  return {};
}

void VerbsLink::submit(std::uint32_t number) {
  line_[(line_begin_ + line_count_) % kLineMax] = static_cast<std::uint8_t>(number);
  ++line_count_;
  (void)flush();
}

void VerbsLink::credit_due(std::uint32_t number, bool now) {
  if (state_ != LinkState::kOpen) return;
  credits_due_ |= 1u << number;
  if (now) (void)flush();
}

bool VerbsLink::handle_send(std::uint32_t index, std::uint64_t id) {
  rails[index].queue().note_send(id);
  silence_ends_ = kForever;
  if (goodbye_received_ && state_ == LinkState::kOpen && !reads_user_memory()) {
    end(LinkState::kClosed, "");
    return true;
  }
  return std::exchange(has_waiter, false);
}

namespace {

std::string reported_by(const Device& device) {
  return "; the device reported: " + device.trouble();
}

}  // namespace

void VerbsLink::handle_failure(std::uint32_t index, const ibv_wc& completion) {
  rails[index].broken = true;
  if (state_ != LinkState::kOpen || goodbye_received_ || !failure_.empty()) return;
  Device& device = rails[index].device();
  const std::string status = device.api().wc_status_str(completion.status);
  failed_device_ = &device;
  failed_here_ = completion.status == IBV_WC_LOC_QP_OP_ERR ||
                 completion.status == IBV_WC_FATAL_ERR || completion.status == IBV_WC_GENERAL_ERR;
  failure_ =
      completion.status == IBV_WC_RETRY_EXC_ERR
          ? no_answer(device) + " (" + status + ")"
          : "the queue pair to " + name_ + " on " + device.name() + " failed (" + status + ")";
}

void VerbsLink::judge(Nanoseconds now) {
  if (state_ != LinkState::kOpen || failure_.empty() || goodbye_received_) return;
  if (failed_here_ && !is_explained()) {
    grace_ends_ = std::min(grace_ends_, now + kReasonGrace);
  } else {
    fail(failure_text());
  }
}

bool VerbsLink::is_explained() const {
  return failed_device_ != nullptr && !failed_device_->trouble().empty();
}

std::string VerbsLink::failure_text() const {
  return is_explained() ? failure_ + reported_by(*failed_device_) : failure_;
}

std::string VerbsLink::no_answer(const Device& device) const {
  return name_ + " does not answer over " + device.name();
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
  grace_ends_ = silence_ends_ = kForever;
  drop_output();
}

void VerbsLink::drop_output() {
  line_count_ = 0;
  credits_due_ = 0;
  notice_waits_ = notice_seen_due_ = false;
  for (VerbsSendChannel& channel : sends_) channel.abandon();
}

void VerbsLink::let_go() {
  has_let_go = true;
  for (VerbsSendChannel& channel : sends_) channel.let_go();
}

bool VerbsLink::reads_user_memory() {
  return !std::all_of(sends_.begin(), sends_.end(),
                      [](VerbsSendChannel& channel) { return channel.flushed(); });
}

void VerbsLink::stop() {
  for (Rail& rail : rails) {
    const auto reads = [&](const VerbsSendChannel& one) { return one.reads_over(rail); };
    if (std::none_of(sends_.begin(), sends_.end(), reads)) continue;
    fail(failure_.empty() ? no_answer(rail.device()) : failure_text());
    rail.broken = true;
    rail.queue().stop();
  }
}

// The end of the connection means that the peer's process is gone, unless a goodbye is still on the
// way. The peer saw that goodbye acknowledged before it closed the connection, but this rank's
// device may report it later than the kernel reports the end.
bool VerbsLink::read_liveness(Nanoseconds now) {
  char bytes[64];
  const ssize_t count = ::recv(liveness_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  const int error = count < 0 ? errno : 0;
  if (error == EAGAIN || error == EINTR) return false;
  if (state_ == LinkState::kOpen && !goodbye_received_) {
    if (count > 0) {
      fail(name_ + " sent bytes where none belong");
    } else if (error != 0 && error != ECONNRESET) {
      fail("no answer from " + name_ + ": " + std::generic_category().message(error));
    } else {
      grace_ends_ = std::min(grace_ends_, now + kGoodbyeGrace);
    }
  }
  return true;
}

Rail* VerbsLink::silent_rail() {
  const auto silent = std::find_if(rails.begin(), rails.end(), [](Rail& rail) {
    return !rail.device().trouble().empty() && rail.queue().owes_completions();
  });
  return silent == rails.end() ? nullptr : &*silent;
}

void VerbsLink::watch_ports(Nanoseconds now) {
  if (state_ != LinkState::kOpen || goodbye_received_ || silent_rail() == nullptr) {
    silence_ends_ = kForever;
  } else if (silence_ends_ == kForever) {
    silence_ends_ = now + kSilenceLasts;
  }
}

bool VerbsLink::grace_is_over(Nanoseconds now) const {
  return grace_ends() <= now || (!failure_.empty() && is_explained());
}

void VerbsLink::end_grace() {
  const Rail* silent = silent_rail();
  if (!failure_.empty()) {
    fail(failure_text());
  } else if (silent != nullptr && silence_ends_ < grace_ends_) {
    fail(no_answer(silent->device()) + reported_by(silent->device()));
  } else {
    fail("the process of " + name_ + " ended without a goodbye");
  }
}

// The messages that a link posts, and its handling of messages that arrive.

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
