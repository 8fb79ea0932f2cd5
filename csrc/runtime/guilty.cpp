// Who is to be named when a deadline has passed: from what all ranks tell of whom they wait for.
#include <algorithm>

#include "runtime/verdict.h"

namespace pycoll::runtime {
namespace {

// An operation that moved within this part of its time, or so many seconds, is slow, not stuck.
constexpr double kMovingPart = 0.1;
constexpr double kMovingSeconds = 0.02;

constexpr Nanoseconds kGraceMin = 250'000'000, kGraceMax = 1'000'000'000;

void add(int rank, std::vector<int>* list) {
  const auto place = std::lower_bound(list->begin(), list->end(), rank);
  if (place == list->end() || *place != rank) list->insert(place, rank);
}

// Walks along who waits for whom.
class Chains {
 public:
  Chains(const std::vector<Account>& accounts, Overdue* overdue)
      : accounts_(accounts), overdue_(overdue), reached_(accounts.size(), false) {}

  void follow(int rank) {
    reach(rank);
    while (!open_.empty()) {
      const Account& account = at(open_.back());
      open_.pop_back();
      overdue_->cut |= account.cut;
      for (const Account::Awaited& awaited : account.awaited) {
        const Account& next = at(awaited.rank);
        if (next.inquiry != Inquiry::kNone) {
          reach(awaited.rank);
        } else {
          const bool entered =
              awaited.sent || (account.sequence != 0 && next.sequence >= account.sequence);
          add(awaited.rank, entered ? &overdue_->still : &overdue_->absent);
        }
      }
    }
  }

  // The ranks that answer at which some chain has come by.
  template <typename Visit>
  void visit_reached(Visit visit) const {
    for (std::size_t rank = 0; rank < reached_.size(); ++rank) {
      if (reached_[rank]) visit(accounts_[rank]);
    }
  }

 private:
  const Account& at(int rank) const { return accounts_[static_cast<std::size_t>(rank)]; }
  void reach(int rank) {
    if (reached_[static_cast<std::size_t>(rank)]) return;
    reached_[static_cast<std::size_t>(rank)] = true;
    open_.push_back(rank);
  }

  const std::vector<Account>& accounts_;
  Overdue* overdue_;
  std::vector<bool> reached_;
  std::vector<int> open_;
};

// Everybody that the chains lead to answers. At fault is who has not come yet, or has not done its
// part of a message; else who waits for nobody, unless all moves.
void judge_answers(const Chains& chains, const Account& due, Overdue* overdue) {
  if (overdue->message) {
    for (const Account::Awaited& one : due.awaited) {
      add(one.rank, one.sent ? &overdue->still : &overdue->absent);
    }
    return;
  }
  const std::uint64_t sequence = due.sequence;
  double still = overdue->seconds;
  chains.visit_reached([&](const Account& account) {
    const bool apart = account.sequence < sequence || account.inquiry == Inquiry::kLate;
    if (apart) add(account.rank, &overdue->absent);
    if (account.awaited.empty()) add(account.rank, &overdue->slow);
    still = std::min(still, account.still);
  });
  if (!overdue->absent.empty()) {
    overdue->slow.clear();
  } else if (still < std::max(kMovingPart * overdue->seconds, kMovingSeconds)) {
    overdue->slow.clear();
    overdue->innocent = Overdue::Innocent::kMoving;
  } else if (overdue->slow.empty()) {
    overdue->innocent = Overdue::Innocent::kCircle;
  }
}

}  // namespace

Account account_of(int rank, int size, const transport::Notice& notice) {
  Account account;
  account.rank = rank;
  account.inquiry = notice.inquiry <= static_cast<std::uint32_t>(Inquiry::kLate)
                        ? static_cast<Inquiry>(notice.inquiry)
                        : Inquiry::kNone;
  account.sequence = notice.sequence;
  account.completed = notice.completed;
  account.still = static_cast<double>(notice.still_ms) * 1e-3;
  const std::size_t told = std::min<std::size_t>(notice.awaited_count, std::size(notice.awaited));
  for (std::size_t i = 0; i < told; ++i) {
    const std::uint32_t peer = notice.awaited[i] / 2;
    if (peer >= static_cast<std::uint32_t>(size)) continue;
    account.awaited.push_back({static_cast<int>(peer), notice.awaited[i] % 2 != 0});
  }
  account.cut = notice.awaited_count > told;
  return account;
}

void write_account(const Account& account, transport::Notice* notice) {
  constexpr double kStillMax = 1e6;  // seconds
  notice->inquiry = static_cast<std::uint32_t>(account.inquiry);
  notice->still_ms = static_cast<std::uint32_t>(std::min(account.still, kStillMax) * 1e3);
  notice->awaited_count = static_cast<std::uint32_t>(account.awaited.size());
  const std::size_t told = std::min(account.awaited.size(), std::size(notice->awaited));
  for (std::size_t i = 0; i < told; ++i) {
    const Account::Awaited& one = account.awaited[i];
    notice->awaited[i] = static_cast<std::uint32_t>(one.rank) * 2 + (one.sent ? 1 : 0);
  }
}

Nanoseconds grace_of(double seconds) {
  const double quarter = std::clamp(seconds, 0.0, 100.0) * 1e9 / 4;
  return std::clamp(static_cast<Nanoseconds>(quarter), kGraceMin, kGraceMax);
}

void find_guilty(int due, const std::vector<Account>& accounts, Overdue* overdue) {
  const Account& first = accounts[static_cast<std::size_t>(due)];
  const std::uint64_t sequence = overdue->message ? 0 : first.sequence;
  Chains chains(accounts, overdue);
  // Any of several ranks could have sent it; and what came with other tags explains more than who
  // holds its sender up.
  const bool plain =
      !overdue->message || (first.awaited.size() == 1 && overdue->message->unreceived.empty());
  if (plain) chains.follow(due);
  for (const Account& account : accounts) {
    const bool beside = sequence != 0 && account.sequence == sequence;
    if (account.inquiry != Inquiry::kNone && beside) chains.follow(account.rank);
  }
  // One rank may have heard of it what another has not.
  std::erase_if(overdue->absent, [&](int rank) {
    return std::binary_search(overdue->still.begin(), overdue->still.end(), rank);
  });
  if (overdue->absent.empty() && overdue->still.empty()) judge_answers(chains, first, overdue);
  if (sequence == 0) return;
  for (const Account& account : accounts) {
    const bool named =
        std::binary_search(overdue->absent.begin(), overdue->absent.end(), account.rank) ||
        std::binary_search(overdue->still.begin(), overdue->still.end(), account.rank);
    if (account.inquiry == Inquiry::kNone && account.sequence < sequence && !named) {
      add(account.rank, &overdue->unheard);
    }
  }
}

}  // namespace pycoll::runtime
