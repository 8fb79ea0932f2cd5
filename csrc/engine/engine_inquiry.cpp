// Deadlines of the engine, and how ranks find the rank at fault. A rank whose deadline has passed
// asks all others in its notice where they are and which ranks they wait for. A rank that is
// inside pycoll answers in its own notice; from then on no operation moves. The lowest rank whose
// deadline has passed judges when all have answered, or at the end of a grace period. The other
// ranks report its verdict.
#include <algorithm>
#include <set>
#include <utility>

#include "engine/diagnosis/notices.h"
#include "engine/engine.h"

namespace pycoll::engine {
namespace {

using transport::Link;
using transport::LinkState;
using transport::Notice;

// A rank that has waited for less than this when it hears of another rank's
// deadline arrived too late.
constexpr Nanoseconds kLateWithin = 5'000'000;

double seconds(Nanoseconds duration) { return static_cast<double>(duration) * 1e-9; }

}  // namespace

void Engine::look_at_deadlines(Nanoseconds now) {
  if (!running_.empty() && now >= running_.front().pending.deadline) {
    overdue_ = {};
    overdue_.seconds = seconds(running_.front().pending.timeout);
    inquire(Inquiry::kDue, now, waits());
    return;
  }
  for (const Deadline& deadline : message_deadlines_) {
    if (deadline.operation->done() || now < deadline.at) continue;
    overdue_ = {};
    overdue_.seconds = seconds(deadline.timeout);
    overdue_.message = late_message(deadline);
    inquire(Inquiry::kDue, now, waited_by(deadline));
    return;
  }
}

void Engine::inquire(Inquiry why, Nanoseconds now, std::vector<Account::Wait> waits) {
  account_.rank = rank();
  account_.inquiry = why;
  account_.still = running_.empty() || began_ == 0 ? 0 : seconds(now - moved_at_);
  account_.waits = std::move(waits);
  inquiry_began_ = now;
  announce();
}

void Engine::answer() {
  const Nanoseconds now = options_.clock->now();
  const bool late = !running_.empty() && (began_ == 0 || now - began_ < kLateWithin);
  overdue_ = {};
  inquire(late ? Inquiry::kLate : Inquiry::kAnswer, now, waits());
}

// The ranks that this rank waits for in the collective, if one runs, because a message may be for
// later. Otherwise the ranks it waits for in all messages.
std::vector<Account::Wait> Engine::waits() const {
  std::vector<bool> waits(links_.size(), false);
  std::vector<bool> sent(links_.size(), false);
  if (!running_.empty()) {
    const executor::Peers peers = running_.front().execution->peers();
    peers.visit_blocking([&](int peer) { waits[static_cast<std::size_t>(peer)] = true; });
    peers.visit_heard([&](int peer) { sent[static_cast<std::size_t>(peer)] = true; });
  } else {
    for (const Deadline& deadline : message_deadlines_) {
      if (deadline.operation->done()) continue;
      for (const Account::Wait& one : waited_by(deadline)) {
        waits[static_cast<std::size_t>(one.rank)] = true;
        if (one.sent) sent[static_cast<std::size_t>(one.rank)] = true;
      }
    }
    for (const OpenProbe& probe : probes_) {
      const int peer = probe.request.peer;
      if (peer >= 0 && peer < size()) waits[static_cast<std::size_t>(peer)] = true;
    }
  }
  std::vector<Account::Wait> all;
  for (std::size_t peer = 0; peer < waits.size(); ++peer) {
    if (waits[peer]) all.push_back({static_cast<int>(peer), sent[peer]});
  }
  return all;
}

// If a part of the message has arrived, its sender is the only rank to wait for.
std::vector<Account::Wait> Engine::waited_by(const Deadline& deadline) const {
  std::vector<Account::Wait> all;
  for (int peer = 0; peer < size(); ++peer) {
    if (deadline.peer == kAnyPeer ? peer == rank() : peer != deadline.peer) continue;
    const auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
    const bool receives = deadline.kind != LateMessage::Kind::kSend;
    if (receives && mailbox != nullptr && mailbox->brings(*deadline.operation))
      return {{peer, true}};
    all.push_back({peer, false});
  }
  return all;
}

// The unclaimed tags in mailboxes distinguish a wrong tag from a rank that never sent.
LateMessage Engine::late_message(const Deadline& deadline) const {
  const bool from_any = deadline.peer == kAnyPeer;
  const int first = rank() == 0 && size() > 1 ? 1 : 0;
  LateMessage late{deadline.kind, rank(), from_any ? first : deadline.peer, deadline.tag, {}};
  if (deadline.kind == LateMessage::Kind::kSend) return late;
  std::set<std::uint32_t> tags;
  for (int peer = 0; peer < size(); ++peer) {
    const auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
    if (mailbox == nullptr || (!from_any && peer != deadline.peer)) continue;
    for (const std::uint32_t tag : mailbox->unreceived_tags()) tags.insert(tag);
  }
  late.unreceived.assign(tags.begin(), tags.end());
  return late;
}

// A rank that only answers leaves the verdict to the judging rank, unless that rank stays silent.
void Engine::resolve_inquiry(Nanoseconds now) {
  std::vector<Account> accounts;
  bool all_answered = true;
  int due = -1;
  Overdue overdue;
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) {
      accounts.push_back(account_);
      accounts.back().sequence = sequence_;
      accounts.back().completed = completed_;
    } else {
      accounts.push_back(account_of(peer, size(), link->newest()));
      const bool open = link->state() == LinkState::kOpen;
      all_answered &= !open || accounts.back().inquiry != Inquiry::kNone;
    }
    if (due >= 0 || accounts.back().inquiry != Inquiry::kDue) continue;
    due = peer;
    overdue = link == nullptr ? overdue_ : overdue_from(detail_of(link->newest()), size());
  }
  const Nanoseconds grace = grace_of(overdue.seconds);
  const bool judges = due == rank();
  if (!(judges && all_answered) && now - inquiry_began_ < (judges ? grace : 2 * grace)) return;
  conclude(due >= 0 ? due : rank(), accounts, std::move(overdue));
}

void Engine::conclude(int due, const std::vector<Account>& accounts, Overdue overdue) {
  if (due != rank()) {
    const Notice notice = links_[static_cast<std::size_t>(due)]->newest();
    sequence_ = notice.sequence;
    descriptor_ = notice.descriptor;
  }
  find_guilty(due, accounts, &overdue);
  const Status verdict =
      timeout_verdict(name_operation(sequence_, descriptor_), overdue, options_.names);
  give_up(verdict, verdict.ranks().empty() ? -1 : verdict.ranks().front(), to_detail(overdue));
}

}  // namespace pycoll::engine
