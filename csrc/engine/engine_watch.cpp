// The slow path of the engine: what a waiting rank learns about its peers, and its conclusions.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/assert.h"
#include "engine/diagnosis/notices.h"
#include "engine/engine.h"

namespace pycoll::engine {
namespace {

using transport::Link;
using transport::LinkState;
using transport::Notice;

// A rank that has waited this long tells its peers which operation it is in. Long compared
// with any step of a healthy operation, short compared with the two seconds in which
// survivors must know of a death.
constexpr Nanoseconds kAnnounceAfter = 5'000'000;

}  // namespace

std::string Engine::current_text(int peer) const {
  if (!on_stream_.empty()) return on_stream_;
  if (!running_.empty()) return name_operation(sequence_, descriptor_);
  std::string text;
  for (const Deadline& deadline : message_deadlines_) {
    if (deadline.operation->done()) continue;
    if (deadline.peer == peer || text.empty()) {
      text = name_message(deadline.kind, deadline.peer, deadline.tag);
    }
    if (deadline.peer == peer) break;
  }
  if (text.empty() && !probes_.empty()) return "a probe";
  return text.empty() ? "send/recv" : text;
}

void Engine::post(Code failure, int culprit, const std::string& detail) {
  Notice notice;
  if (failure == Code::kOk) write_account(account_, &notice);
  notice.completed = completed_;
  const bool searches = disputes() && failure == Code::kOk;
  notice.sequence = searches ? disputed_standing_.sequence : sequence_;
  notice.descriptor = searches ? disputed_standing_.descriptor : descriptor_;
  notice.failure = static_cast<std::uint32_t>(failure);
  notice.culprit = culprit;
  std::snprintf(notice.detail, sizeof(notice.detail), "%s", detail.c_str());
  notice.dispute = dispute_;
  notice.refusals = refusals_;
  for (Link* link : links_) {
    if (link != nullptr) link->post(notice);
  }
}

void Engine::announce() {
  announced_ = true;
  tell();
}

// Posts the state of this rank and its findings, if a deadline has passed or ranks disagree.
void Engine::tell() {
  post(Code::kOk, -1,
       disputes()   ? disputed_standing_.array.value_or("")
       : inquires() ? to_detail(overdue_)
                    : stream_detail(on_streams_.load(std::memory_order_relaxed)));
}

// Fails every open operation and all later ones. The notice makes the peers do the same.
void Engine::give_up(const Status& status, int culprit, const std::string& detail) {
  const Code told = status.code() == Code::kInterrupted ? Code::kPeerLost : status.code();
  post(told, culprit, detail);
  failure_ = Status::error(status.code(), "the communicator has failed: " + status.message(),
                           status.ranks(), status.how());
  end_all(status);
}

void Engine::interrupt(const std::string& why) {
  if (!failure_.ok()) return;
  give_up(Status::error(Code::kInterrupted, "interrupted during " + current_text(kAnyPeer)), rank(),
          why);
}

bool Engine::owes_reason() const {
  return !failure_.ok() && !closed_ &&
         std::any_of(outputs_.begin(), outputs_.end(),
                     [](const auto* output) { return output->has_unsent(); });
}

bool Engine::watch() {
  if (owes_reason()) return poll();
  if (!failure_.ok() || !active()) return false;
  bool moved = poll();
  moved |= step();
  if (!failure_.ok() || !active()) return true;
  const Nanoseconds now = options_.clock->now();
  if (!running_.empty()) {
    Pending& current = running_.front().pending;
    if (began_ == 0) {
      began_ = now;
      current.deadline = later(now, current.timeout);
    }
    const std::uint64_t progress = running_.front().execution->progress();
    if (began_ == now || progress != progress_) moved_at_ = now;
    progress_ = progress;
    if (!announced_ && now - began_ >= kAnnounceAfter) announce();
  }
  if (look_at_notices()) return true;
  look_at_overtaking(now);
  if (disputes()) {
    resolve_disagreement(now);
    return moved;
  }
  if (look_at_links(moved)) return true;
  inquires() ? resolve_inquiry(now) : look_at_deadlines(now);
  return moved || !failure_.ok();
}

// The reasons of peers come before this rank's own observations. A rank that closes because another
// one died posts that first, so the dead rank is named.
bool Engine::look_at_notices() {
  if (look_at_refusals()) return true;
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    switch (failure_of(notice)) {
      case Code::kOk:
        if (!disputes() && notice.dispute.operation != 0) {
          disagree(notice.dispute.operation);
        } else if (!running_.empty() && !disputes() && announced_ && notice.sequence == sequence_ &&
                   !(notice.descriptor == descriptor_)) {
          disagree(sequence_);
        }
        if (notice.inquiry != 0 && !disputes() && !inquires()) answer();
        break;
      case Code::kClosed:
        break;
      case Code::kMismatch:
        if (hear_from_stream(peer, notice)) return true;
        if (!disputes()) disagree(std::max<std::uint64_t>(1, notice.dispute.operation));
        break;
      case Code::kTimeout:
        hear_timeout(notice);
        return true;
      case Code::kInvalidArgument:
        hear_refusal(peer, notice);
        return true;
      case Code::kReduction:
        hear_codes(peer, notice);
        return true;
      default:
        hear_loss(peer, notice);
        return true;
    }
  }
  return false;
}

// Whether a peer has failed, or is about to fail, without having ended this operation. warned_
// keeps the news, because the failure may be of an operation that begins here only later.
bool Engine::is_given_up(std::uint64_t sequence) {
  bool news = warned_;
  for (const auto& medium : options_.transports) news |= medium->has_new_notices();
  if (!news) return false;
  for (Link* link : links_) {
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    const Code failure = failure_of(notice);
    const bool goes_on =
        failure == Code::kOk && notice.inquiry == 0 && notice.dispute.operation == 0;
    if (goes_on || failure == Code::kClosed) continue;
    warned_ = true;
    if (notice.completed < sequence) return true;
  }
  return false;
}

// Fails with the verdict of the rank whose deadline has passed.
void Engine::hear_timeout(const Notice& notice) {
  const Overdue overdue = overdue_from(detail_of(notice), size());
  sequence_ = notice.sequence;  // so that this rank's notice tells peers the same
  descriptor_ = notice.descriptor;
  give_up(
      timeout_verdict(name_operation(notice.sequence, notice.descriptor), overdue, options_.names),
      notice.culprit, detail_of(notice));
}

void Engine::hear_loss(int peer, const Notice& notice) {
  const bool known = notice.culprit >= 0 && notice.culprit < size();
  const int culprit = known ? notice.culprit : peer;
  give_up(peer_lost_verdict(culprit, detail_of(notice), current_text(culprit), options_.names),
          culprit, detail_of(notice));
}

bool Engine::awaits(int peer) {
  bool waits = false;
  if (!running_.empty()) {
    running_.front().execution->peers().visit_waits([&](int other) { waits |= other == peer; });
  }
  // A receive from any peer can be fulfilled as long as one peer is left, or messages of one that
  // has gone.
  bool are_all_gone = true;
  for (int other = 0; other < size(); ++other) {
    Link* link = links_[static_cast<std::size_t>(other)];
    if (link == nullptr) continue;
    are_all_gone &= link->state() != LinkState::kOpen && !has_more_of(other);
  }
  const auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
  for (const Deadline& deadline : message_deadlines_) {
    waits |= deadline.peer == peer || (deadline.peer == kAnyPeer && are_all_gone);
    // The receive has taken the first part of a message of this peer.
    waits |= mailbox != nullptr && mailbox->brings(*deadline.operation);
  }
  for (const OpenProbe& probe : probes_) {
    waits |= probe.request.peer == peer || (probe.request.peer == kAnyPeer && are_all_gone);
  }
  return waits;
}

// Whether messages of this peer have come that the next step() takes; each step takes a few only.
bool Engine::has_more_of(int peer) {
  const auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
  if (mailbox == nullptr || inquires()) return false;
  if (!mailbox->receiving() && from_any_.recvs.empty() && probes_.empty()) return false;
  return recv_channel(peer, transport::kMessageChannel).peek() != nullptr;
}

// The poll that found a link closed has made everything receivable that the peer sent before. If
// this rank waits for more from that peer, it fails. A dead peer fails the communicator in any
// case, but first everything moves that can move without it.
bool Engine::look_at_links(bool moved) {
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const LinkState state = link->state();
    if (state == LinkState::kOpen || has_more_of(peer)) continue;
    if ((state == LinkState::kClosed || moved) && !awaits(peer)) continue;
    const std::string how =
        state == LinkState::kClosed
            ? std::string("it closed its communicator before the operation was done")
            : link->reason();
    give_up(peer_lost_verdict(peer, how, current_text(peer), options_.names), peer, how);
    return true;
  }
  return false;
}

}  // namespace pycoll::engine
