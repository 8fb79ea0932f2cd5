#include "engine/diagnosis/guilty.h"

#include <algorithm>

namespace pycoll::engine {
namespace {

// An operation that moved within this fraction of its timeout, or these
// seconds, is slow and not stuck.
constexpr double kMovingPart = 0.1;
constexpr double kMovingSeconds = 0.02;

constexpr Nanoseconds kGraceMin = 250'000'000, kGraceMax = 1'000'000'000;

void add(int rank, std::vector<int>* list) {
  const auto place = std::lower_bound(list->begin(), list->end(), rank);
  if (place == list->end() || *place != rank) list->insert(place, rank);
}

// Follows the chains of ranks that wait for each other.
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
      for (const Account::Wait& waits : account.waits) {
        const Account& next = at(waits.rank);
        if (next.inquiry != Inquiry::kNone) {
          reach(waits.rank);
        } else {
          const bool entered =
              waits.sent || (account.sequence != 0 && next.sequence >= account.sequence);
          add(waits.rank, entered ? &overdue_->still : &overdue_->absent);
        }
      }
    }
  }

  // Visits the ranks that answer and lie on some chain.
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

// Judges when all ranks on the chains answer. At fault are the ranks that have not
// arrived, or have not done their part of a message; else the ranks that wait for no rank,
// unless the operation moves.
void judge_answers(const Chains& chains, const Account& due, Overdue* overdue) {
  if (overdue->message) {
    for (const Account::Wait& one : due.waits) {
      add(one.rank, one.sent ? &overdue->still : &overdue->absent);
    }
    return;
  }
  const std::uint64_t sequence = due.sequence;
  double still = overdue->seconds;
  chains.visit_reached([&](const Account& account) {
    const bool apart = account.sequence < sequence || account.inquiry == Inquiry::kLate;
    if (apart) add(account.rank, &overdue->absent);
    if (account.waits.empty()) add(account.rank, &overdue->slow);
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
  const std::size_t told = std::min<std::size_t>(notice.wait_count, std::size(notice.waits));
  for (std::size_t i = 0; i < told; ++i) {
    const std::uint32_t peer = notice.waits[i] / 2;
    if (peer >= static_cast<std::uint32_t>(size)) continue;
    account.waits.push_back({static_cast<int>(peer), notice.waits[i] % 2 != 0});
  }
  account.cut = notice.wait_count > told;
  return account;
}

void write_account(const Account& account, transport::Notice* notice) {
  constexpr double kStillMax = 1e6;  // seconds
  notice->inquiry = static_cast<std::uint32_t>(account.inquiry);
  notice->still_ms = static_cast<std::uint32_t>(std::min(account.still, kStillMax) * 1e3);
  notice->wait_count = static_cast<std::uint32_t>(account.waits.size());
  const std::size_t told = std::min(account.waits.size(), std::size(notice->waits));
  for (std::size_t i = 0; i < told; ++i) {
    const Account::Wait& one = account.waits[i];
    notice->waits[i] = static_cast<std::uint32_t>(one.rank) * 2 + (one.sent ? 1 : 0);
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
  // Any of several ranks could have sent the message. If messages with other tags have arrived,
  // these explain more than the ranks for which the sender waits.
  const bool plain =
      !overdue->message || (first.waits.size() == 1 && overdue->message->unreceived.empty());
  if (plain) chains.follow(due);
  for (const Account& account : accounts) {
    const bool on_stream = sequence != 0 && account.sequence == sequence;
    if (account.inquiry != Inquiry::kNone && on_stream) chains.follow(account.rank);
  }
  // One rank may have received a segment of a peer from which another rank has received none.
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

}  // namespace pycoll::engine
