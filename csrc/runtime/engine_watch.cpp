// The slow path of the engine: what a waiting rank learns about its peers and concludes from it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#include "base/assert.h"
#include "runtime/engine.h"
#include "runtime/notices.h"

namespace pycoll::runtime {
namespace {

using transport::Link;
using transport::LinkState;
using transport::Notice;

// A rank that has waited this long tells its peers which operation it is in. Long against any step
// of a healthy operation, short against the two seconds in which survivors must know.
constexpr Nanoseconds kAnnounceAfter = 5'000'000;

// How long a rank that found a disagreement waits for the others' descriptions before it judges.
constexpr Nanoseconds kDisputeLasts = 1'000'000'000;

double seconds(Nanoseconds duration) { return static_cast<double>(duration) * 1e-9; }

// The operation that ranks disagree about, from a notice with kMismatch; its sender may be in
// another one. Never 0.
std::uint64_t disputed_in(const Notice& notice) {
  return std::max<std::uint64_t>(1, std::strtoull(detail_of(notice).c_str(), nullptr, 10));
}

}  // namespace

std::string Engine::current_text(int peer) const {
  if (!beside_.empty()) return beside_;
  if (!running_.empty()) return name_operation(sequence_, descriptor_);
  std::string text;
  for (const Deadline& deadline : message_deadlines_) {
    const auto operation = deadline.operation.lock();
    if (operation == nullptr || operation->done()) continue;
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
  notice.sequence = sequence_;
  notice.descriptor = descriptor_;
  notice.failure = static_cast<std::uint32_t>(failure);
  notice.culprit = culprit;
  std::snprintf(notice.detail, sizeof(notice.detail), "%s", detail.c_str());
  for (Link* link : links_) {
    if (link != nullptr) link->post(notice);
  }
}

void Engine::announce() {
  announced_ = true;
  post(Code::kOk, -1, besides_detail(besides_.load(std::memory_order_relaxed)));
}

// Ends every open operation and all later ones; the notice makes the peers do the same.
void Engine::give_up(const Status& status, int culprit, const std::string& detail) {
  const Code told = status.code() == Code::kInterrupted ? Code::kPeerLost : status.code();
  post(told, culprit, detail);
  failure_ = Status::error(status.code(), "the communicator has failed: " + status.message(),
                           status.ranks(), status.how());
  end_all(status);
}

void Engine::interrupt() {
  if (!failure_.ok()) return;
  give_up(Status::error(Code::kInterrupted, "interrupted during " + current_text(kAnyPeer)), rank(),
          "interrupted by its user");
}

bool Engine::watch() {
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
    if (!announced_ && now - began_ >= kAnnounceAfter) announce();
  }
  if (look_at_notices()) return true;
  if (disputed_ != 0) {
    resolve_disagreement(now);
    return moved;
  }
  if (look_at_links(moved)) return true;
  look_at_deadlines(now);
  return moved || !failure_.ok();
}

// Peers' reasons come before what this rank sees itself: a rank that closes because another one
// died says so first, and the dead one gets the blame.
bool Engine::look_at_notices() {
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    switch (failure_of(notice)) {
      case Code::kOk:
        if (!running_.empty() && disputed_ == 0 && announced_ && notice.sequence == sequence_ &&
            !(notice.descriptor == descriptor_)) {
          disagree(sequence_);
        }
        break;
      case Code::kClosed:
        break;
      case Code::kMismatch:
        if (hear_beside(peer, notice)) return true;
        if (disputed_ == 0) disagree(disputed_in(notice));
        break;
      case Code::kTimeout:
        hear_timeout(notice);
        return true;
      default:
        hear_loss(peer, notice);
        return true;
    }
  }
  return false;
}

// In the words of the rank whose deadline it was.
void Engine::hear_timeout(const Notice& notice) {
  const Overdue overdue = overdue_from(detail_of(notice), size());
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

bool Engine::awaits(int peer) const {
  bool awaited = false;
  if (!running_.empty()) {
    running_.front().execution->visit_awaited([&](int other) { awaited |= other == peer; });
  }
  // A receive from any peer awaits the last one that is left.
  const bool are_all_gone = std::none_of(links_.begin(), links_.end(), [](Link* link) {
    return link != nullptr && link->state() == LinkState::kOpen;
  });
  for (const Deadline& deadline : message_deadlines_) {
    awaited |= deadline.peer == peer || (deadline.peer == kAnyPeer && are_all_gone);
  }
  for (const OpenProbe& probe : probes_) {
    awaited |= probe.request.peer == peer || (probe.request.peer == kAnyPeer && are_all_gone);
  }
  return awaited;
}

// What a peer had sent before it left can be received since the poll that found it gone; what this
// rank still awaits of it will not come, whatever else moves. A dead peer ends everything, but what
// can move without it moves first.
bool Engine::look_at_links(bool moved) {
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const LinkState state = link->state();
    if (state == LinkState::kOpen) continue;
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

void Engine::look_at_deadlines(Nanoseconds now) {
  if (!running_.empty() && now >= running_.front().pending.deadline) {
    const Running& late = running_.front();
    Overdue overdue{seconds(late.pending.timeout), false, absent(), "", {}};
    if (overdue.ranks.empty()) {
      overdue.entered = true;
      std::set<int> awaited;
      late.execution->visit_awaited([&](int peer) { awaited.insert(peer); });
      overdue.ranks.assign(awaited.begin(), awaited.end());
    }
    expire(overdue);
    return;
  }
  for (const Deadline& deadline : message_deadlines_) {
    const auto operation = deadline.operation.lock();
    if (operation == nullptr || operation->done() || now < deadline.at) continue;
    expire(overdue_of(deadline, *operation));
    return;
  }
}

// What lies in mailboxes tells a mistaken tag from a rank that never sent.
Overdue Engine::overdue_of(const Deadline& deadline, const Operation& operation) const {
  Overdue found{seconds(deadline.timeout), false, {deadline.peer}, "", {}};
  if (deadline.peer == kAnyPeer) {
    found.ranks.clear();
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) found.ranks.push_back(peer);
    }
  }
  found.message = LateMessage{deadline.kind, rank(), deadline.tag, {}};
  if (deadline.kind == LateMessage::Kind::kSend) return found;
  std::set<std::uint32_t> tags;
  for (const int peer : found.ranks) {
    const auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
    if (mailbox == nullptr) continue;
    for (const std::uint32_t tag : mailbox->unreceived_tags()) tags.insert(tag);
    if (!mailbox->brings(operation)) continue;
    found.entered = true;
    found.ranks = {peer};
    break;
  }
  found.message->unreceived.assign(tags.begin(), tags.end());
  return found;
}

void Engine::expire(const Overdue& overdue) {
  give_up(timeout_verdict(current_text(kAnyPeer), overdue, options_.names),
          overdue.ranks.empty() ? -1 : overdue.ranks.front(), to_detail(overdue));
}

// Peers hear of it at once, and of what this rank was doing: from here on it does nothing else.
void Engine::disagree(std::uint64_t sequence) {
  // It may have begun beside what runs first: then that is what peers must hear of.
  if (sequence > sequence_ && sequence <= entered_) {
    descriptor_ = running_[sequence - sequence_].execution->request().descriptor;
    sequence_ = sequence;
  }
  disputed_ = sequence;
  dispute_ends_ = later(options_.clock->now(), kDisputeLasts);
  disputed_standing_ = {rank(), sequence_, descriptor_};
  announced_ = true;
  post(Code::kMismatch, -1, std::to_string(sequence));
}

// Peers that have not entered the current operation, as far as this rank can know: they have not
// said so, and nothing of it has come from them.
std::vector<int> Engine::absent() {
  std::vector<bool> heard(links_.size(), false);
  running_.front().execution->visit_heard(
      [&](int peer) { heard[static_cast<std::size_t>(peer)] = true; });
  std::vector<int> missing;
  for (const Standing& standing : standings()) {
    if (standing.rank == rank() || heard[static_cast<std::size_t>(standing.rank)]) continue;
    if (standing.sequence < sequence_) missing.push_back(standing.rank);
  }
  return missing;
}

std::vector<Standing> Engine::standings() {
  std::vector<Standing> all;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      all.push_back(disputed_ != 0 ? disputed_standing_ : Standing{peer, sequence_, descriptor_});
      continue;
    }
    const Notice notice = links_[static_cast<std::size_t>(peer)]->newest();
    all.push_back({peer, notice.sequence, notice.descriptor});
  }
  return all;
}

// Judges once every peer has said what it does, or when the time for that is over.
void Engine::resolve_disagreement(Nanoseconds now) {
  const bool heard_all = std::all_of(links_.begin(), links_.end(), [](Link* link) {
    if (link == nullptr || link->state() != LinkState::kOpen) return true;
    return failure_of(link->newest()) == Code::kMismatch;
  });
  if (!heard_all && now < dispute_ends_) return;
  // Several ranks may have found something odd at once: all judge the first of it.
  std::uint64_t first = disputed_;
  for (Link* link : links_) {
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    if (failure_of(notice) == Code::kMismatch) first = std::min(first, disputed_in(notice));
  }
  const Status verdict = mismatch_verdict(first, standings());
  give_up(verdict, verdict.ranks().empty() ? -1 : verdict.ranks().front(), "");
}

}  // namespace pycoll::runtime
