#include "engine/diagnosis/deadline_inquiry.h"

#include <utility>

#include "engine/diagnosis/notices.h"

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

void DeadlineInquiry::look(Nanoseconds now) {
  Collectives& collectives = operations_.collectives;
  Overdue& overdue = report_.findings().overdue;
  if (!collectives.idle() && now >= collectives.wait().deadline) {
    overdue = {};
    overdue.seconds = seconds(collectives.timeout());
    open(Inquiry::kDue, now, waits());
    return;
  }
  const OpenMessages& messages = operations_.messages;
  const OpenMessage* late = messages.late(now);
  if (late == nullptr) return;
  overdue = {};
  overdue.seconds = seconds(late->timeout);
  overdue.message = messages.describe(*late);
  open(Inquiry::kDue, now, messages.waits_of(*late));
}

void DeadlineInquiry::open(Inquiry why, Nanoseconds now, std::vector<PeerWait> waits) {
  Collectives& collectives = operations_.collectives;
  collectives.hold(0);
  operations_.messages.hold();
  Account& account = report_.findings().account;
  account.rank = operations_.peers.rank();
  account.inquiry = why;
  const Collectives::Wait& wait = collectives.wait();
  account.still = collectives.idle() || wait.began == 0 ? 0 : seconds(now - wait.moved_at);
  account.waits = std::move(waits);
  began_ = now;
  report_.announce();
}

void DeadlineInquiry::answer() {
  const Nanoseconds now = operations_.peers.clock().now();
  Collectives& collectives = operations_.collectives;
  const Nanoseconds began = collectives.wait().began;
  const bool late = !collectives.idle() && (began == 0 || now - began < kLateWithin);
  report_.findings().overdue = {};
  open(late ? Inquiry::kLate : Inquiry::kAnswer, now, waits());
}

// The ranks that this rank waits for in the collective, if one runs, because a message may be for
// later. Otherwise the ranks it waits for in all messages.
std::vector<PeerWait> DeadlineInquiry::waits() const {
  const Execution* oldest = operations_.collectives.oldest();
  if (oldest == nullptr) return operations_.messages.waits();
  const auto size = static_cast<std::size_t>(operations_.peers.size());
  std::vector<bool> waits(size, false);
  std::vector<bool> sent(size, false);
  const executor::PeerWaits waited = oldest->peer_waits();
  waited.visit_blocking([&](int peer) { waits[static_cast<std::size_t>(peer)] = true; });
  waited.visit_heard([&](int peer) { sent[static_cast<std::size_t>(peer)] = true; });
  std::vector<PeerWait> all;
  for (std::size_t peer = 0; peer < size; ++peer) {
    if (waits[peer]) all.push_back({static_cast<int>(peer), sent[peer]});
  }
  return all;
}

// A rank that only answers leaves the verdict to the judging rank, unless that rank stays silent.
void DeadlineInquiry::resolve(Nanoseconds now) {
  const Peers& peers = operations_.peers;
  const Findings& findings = report_.findings();
  std::vector<Account> accounts;
  bool all_answered = true;
  int due = -1;
  Overdue overdue;
  for (int peer = 0; peer < peers.size(); ++peer) {
    Link* link = peers.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr) {
      accounts.push_back(findings.account);
      accounts.back().sequence = operations_.collectives.sequence();
      accounts.back().completed = operations_.collectives.completed();
    } else {
      accounts.push_back(account_of(peer, peers.size(), link->newest()));
      const bool open = link->state() == LinkState::kOpen;
      all_answered &= !open || accounts.back().inquiry != Inquiry::kNone;
    }
    if (due >= 0 || accounts.back().inquiry != Inquiry::kDue) continue;
    due = peer;
    overdue =
        link == nullptr ? findings.overdue : overdue_from(detail_of(link->newest()), peers.size());
  }
  const Nanoseconds grace = grace_of(overdue.seconds);
  const bool judges = due == peers.rank();
  if (!(judges && all_answered) && now - began_ < (judges ? grace : 2 * grace)) return;
  conclude(due >= 0 ? due : peers.rank(), accounts, std::move(overdue));
}

void DeadlineInquiry::conclude(int due, const std::vector<Account>& accounts, Overdue overdue) {
  const Peers& peers = operations_.peers;
  Standing at{due, operations_.collectives.sequence(), operations_.collectives.descriptor()};
  if (due != peers.rank()) {
    const Notice notice = peers.links()[static_cast<std::size_t>(due)]->newest();
    at.sequence = notice.sequence;
    at.descriptor = notice.descriptor;
  }
  find_guilty(due, accounts, &overdue);
  const Status verdict =
      timeout_verdict(name_operation(at.sequence, at.descriptor), overdue, peers.names());
  report_.give_up(verdict, verdict.ranks().empty() ? -1 : verdict.ranks().front(),
                  to_detail(overdue), at);
}

void DeadlineInquiry::hear(const Notice& notice) {
  const Peers& peers = operations_.peers;
  const Overdue overdue = overdue_from(detail_of(notice), peers.size());
  // This rank's notice tells peers the same.
  const Standing at{peers.rank(), notice.sequence, notice.descriptor};
  report_.give_up(
      timeout_verdict(name_operation(at.sequence, at.descriptor), overdue, peers.names()),
      notice.culprit, detail_of(notice), at);
}

}  // namespace pycoll::engine
