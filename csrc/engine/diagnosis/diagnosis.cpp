#include "engine/diagnosis/diagnosis.h"

#include <algorithm>

#include "engine/diagnosis/notices.h"

namespace pycoll::engine {
namespace {

using transport::Link;
using transport::LinkState;
using transport::Notice;

// A rank that has waited this long tells its peers which operation it is in. Long compared with any
// step of a healthy operation, short compared with the two seconds in which survivors must know of
// a death.
constexpr Nanoseconds kAnnounceAfter = 5'000'000;

// How long a rank that a peer has overtaken in an operation waits to hear the reason.
constexpr Nanoseconds kOvertakenLasts = 1'000'000'000;

constexpr const char* kLeft = "it closed its communicator before the operation was done";

}  // namespace

bool Diagnosis::conclude(Collectives::Event event) {
  const int rank = operations_.peers.rank();
  switch (event) {
    case Collectives::Event::kNone:
      return false;
    case Collectives::Event::kRefused:
      refusals_.tell_invalid();
      return true;
    case Collectives::Event::kDisagree:
      disagreement_.open(operations_.collectives.sequence());
      return true;
    case Collectives::Event::kSpoiled:
      report_.give_up(Status::error(Code::kInterrupted, "the reduction raised an error in " +
                                                            report_.name_current(rank)),
                      rank, "its reduction raised an error");
      return true;
    case Collectives::Event::kGivenUp:
      return look_at_notices();
  }
  return false;
}

void Diagnosis::fail_broken(int peer) {
  const std::string how = "it sent a malformed message";
  report_.give_up(
      peer_lost_verdict(peer, how, report_.name_current(peer), operations_.peers.names()), peer,
      how);
}

void Diagnosis::interrupt(const std::string& why) {
  report_.give_up(
      Status::error(Code::kInterrupted, "interrupted during " + report_.name_current(kAnyPeer)),
      operations_.peers.rank(), why);
}

bool Diagnosis::look(bool moved) {
  const Nanoseconds now = operations_.peers.clock().now();
  if (!operations_.collectives.idle()) follow_oldest(now);
  if (look_at_notices()) return true;
  look_at_overtaking(now);
  const Findings& findings = report_.findings();
  if (findings.disputes()) {
    disagreement_.resolve(now);
    return moved;
  }
  if (look_at_links(moved)) return true;
  findings.inquires() ? inquiry_.resolve(now) : inquiry_.look(now);
  return moved || report_.is_over();
}

// The deadline of the oldest collective counts from this rank's first wait in it.
void Diagnosis::follow_oldest(Nanoseconds now) {
  const Collectives& collectives = operations_.collectives;
  Collectives::Wait& wait = operations_.collectives.wait();
  if (wait.began == 0) {
    wait.began = now;
    wait.deadline = later(now, collectives.timeout());
  }
  const std::uint64_t progress = collectives.oldest()->progress();
  if (wait.began == now || progress != wait.progress) wait.moved_at = now;
  wait.progress = progress;
  if (!wait.announced && now - wait.began >= kAnnounceAfter) report_.announce();
}

// The reasons of peers come before this rank's own observations. A rank that closes because another
// one died posts that first, so the dead rank is named.
bool Diagnosis::look_at_notices() {
  if (refusals_.look()) return true;
  const Peers& peers = operations_.peers;
  for (int peer = 0; peer < peers.size(); ++peer) {
    Link* link = peers.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    switch (failure_of(notice)) {
      case Code::kOk:
        look_at_state(notice);
        break;
      case Code::kClosed:
        break;
      case Code::kMismatch:
        if (order_.hear(peer, notice)) return true;
        if (!report_.findings().disputes()) {
          disagreement_.open(std::max<std::uint64_t>(1, notice.dispute.operation));
        }
        break;
      case Code::kTimeout:
        inquiry_.hear(notice);
        return true;
      case Code::kInvalidArgument:
        refusals_.hear(peer, notice);
        return true;
      case Code::kReduction:
        order_.hear_codes(peer, notice);
        return true;
      default:
        hear_loss(peer, notice);
        return true;
    }
  }
  return false;
}

// The notice of a peer that has not failed.
void Diagnosis::look_at_state(const Notice& notice) {
  const Findings& findings = report_.findings();
  Collectives& collectives = operations_.collectives;
  if (findings.disputes()) return;
  if (notice.dispute.operation != 0) {
    disagreement_.open(notice.dispute.operation);
  } else if (!collectives.idle() && collectives.wait().announced &&
             notice.sequence == collectives.sequence() &&
             !(notice.descriptor == collectives.descriptor())) {
    disagreement_.open(collectives.sequence());
  }
  if (notice.inquiry != 0 && !findings.disputes() && !findings.inquires()) inquiry_.answer();
}

void Diagnosis::hear_loss(int peer, const Notice& notice) {
  const Peers& peers = operations_.peers;
  const bool known = notice.culprit >= 0 && notice.culprit < peers.size();
  const int culprit = known ? notice.culprit : peer;
  report_.give_up(
      peer_lost_verdict(culprit, detail_of(notice), report_.name_current(culprit), peers.names()),
      culprit, detail_of(notice));
}

// A peer that has ended the operation in which this rank waits must have heard of a refusal. Notice
// of the refusal may arrive here later than the peer's segments. If it does not arrive within
// kOvertakenLasts, the ranks disagree.
void Diagnosis::look_at_overtaking(Nanoseconds now) {
  const Execution* oldest = operations_.collectives.oldest();
  if (report_.findings().disputes() || oldest == nullptr || !oldest->is_overtaken()) {
    overtaken_ends_ = 0;
  } else if (overtaken_ends_ == 0) {
    overtaken_ends_ = later(now, kOvertakenLasts);
  } else if (now >= overtaken_ends_) {
    overtaken_ends_ = 0;
    disagreement_.open(operations_.collectives.sequence());
  }
}

bool Diagnosis::awaits(int peer) const {
  bool waits = false;
  if (const Execution* oldest = operations_.collectives.oldest(); oldest != nullptr) {
    oldest->peer_waits().visit_waits([&](int other) { waits |= other == peer; });
  }
  return waits || operations_.messages.waits_for(peer);
}

// The poll that found a link closed has made everything receivable that the peer sent before. If
// this rank waits for more from that peer, it fails. A dead peer fails the communicator in any
// case, but first everything moves that can move without it.
bool Diagnosis::look_at_links(bool moved) {
  const Peers& peers = operations_.peers;
  for (int peer = 0; peer < peers.size(); ++peer) {
    Link* link = peers.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const LinkState state = link->state();
    if (state == LinkState::kOpen || operations_.messages.has_more_of(peer)) continue;
    if ((state == LinkState::kClosed || moved) && !awaits(peer)) continue;
    const std::string how = state == LinkState::kClosed ? kLeft : link->reason();
    report_.give_up(peer_lost_verdict(peer, how, report_.name_current(peer), peers.names()), peer,
                    how);
    return true;
  }
  return false;
}

void Diagnosis::look_on_stream(const std::string& operation, bool patient) {
  Findings& findings = report_.findings();
  findings.on_stream = operation;
  (void)operations_.peers.poll(true);
  (void)look_at_notices();
  bool over = report_.is_over() || refusals_.look_on_stream(operation) || order_.look(operation);
  const Peers& peers = operations_.peers;
  for (int peer = 0; peer < peers.size() && !over; ++peer) {
    Link* link = peers.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr || link->state() == LinkState::kOpen) continue;
    const bool left = link->state() == LinkState::kClosed;
    if (left && patient) continue;
    const std::string how = left ? kLeft : link->reason();
    report_.give_up(peer_lost_verdict(peer, how, operation, peers.names()), peer, how);
    over = true;
  }
  findings.on_stream.clear();
}

}  // namespace pycoll::engine
