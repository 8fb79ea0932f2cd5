// The engine's part of operations that run beside it, on devices: what a rank that waits there
// learns about its peers, and what they hear of it.
#include <algorithm>
#include <string_view>
#include <utility>

#include "runtime/engine.h"
#include "runtime/notices.h"

namespace pycoll::runtime {
namespace {

using transport::Link;
using transport::LinkState;
using transport::Notice;

// What the detail of a mismatch begins with that a kernel found; that of the engine's own begins
// with a number.
constexpr std::string_view kBeside = "beside: ";

// How long a rank that sees others elsewhere waits for the rest to say where they are.
constexpr Nanoseconds kApartLasts = 1'000'000'000;

}  // namespace

void Engine::count_beside(bool replayable) {
  std::uint64_t count = besides_.load(std::memory_order_relaxed);
  while (count != kUncounted &&
         !besides_.compare_exchange_weak(count, replayable ? kUncounted : count + 1,
                                         std::memory_order_relaxed)) {
  }
}

// A mismatch about an operation beside the engine, if it is one.
bool Engine::hear_beside(int peer, const Notice& notice) {
  const std::string detail = detail_of(notice);
  if (is_apart(detail)) {
    hear_apart(notice);
  } else if (detail.starts_with(kBeside)) {
    hear_mismatch(peer, notice);
  } else {
    return false;
  }
  return true;
}

// Kernels know no descriptions: only who found a segment of another operation, and whose.
void Engine::hear_mismatch(int peer, const Notice& notice) {
  const int culprit = notice.culprit >= 0 && notice.culprit < size() ? notice.culprit : peer;
  give_up(Status::error(Code::kMismatch,
                        detail_of(notice).substr(kBeside.size()) + ": " +
                            name_rank(peer, options_.names) + " found that " +
                            name_rank(culprit, options_.names) +
                            " is in another operation; all ranks must call alike",
                        {culprit}),
          culprit, detail_of(notice));
}

// In the words of the rank that judged.
void Engine::hear_apart(const Notice& notice) {
  const std::string detail = detail_of(notice);
  Apart apart = apart_from(detail, size());
  apart.sequence = sequence_ = notice.sequence;
  apart.descriptor = descriptor_ = notice.descriptor;
  give_up(order_verdict(apart, options_.names), notice.culprit, detail);
}

void Engine::look_beside(const std::string& operation, bool patient) {
  if (!failure_.ok() || closed_) return;
  beside_ = operation;
  (void)poll();
  (void)look_at_notices();
  bool over = !failure_.ok() || look_at_refusals_beside(operation) || look_at_order(operation);
  for (int peer = 0; peer < size() && !over; ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr || link->state() == LinkState::kOpen) continue;
    const bool left = link->state() == LinkState::kClosed;
    if (left && patient) continue;
    const std::string how =
        left ? "it closed its communicator before the operation was done" : link->reason();
    give_up(peer_lost_verdict(peer, how, operation, options_.names), peer, how);
    over = true;
  }
  beside_.clear();
}

void Engine::fail_beside(const Status& status, const std::string& operation, double after) {
  if (!failure_.ok() || closed_) return;
  const int culprit = status.ranks().empty() ? rank() : status.ranks().front();
  if (status.code() == Code::kTimeout) {
    Overdue overdue;
    overdue.seconds = after;
    overdue.still = status.ranks();
    overdue.beside = operation;
    give_up(timeout_verdict(operation, overdue, options_.names), culprit, to_detail(overdue));
  } else if (status.code() == Code::kMismatch) {
    give_up(status, culprit, std::string(kBeside) + operation);
  } else {
    give_up(status, culprit, status.message());
  }
}

// A peer that has entered a collective that this rank has not called, and has not called all
// operations beside the engine that this rank has, calls them in another order: it waits there for
// us, and we here for it. Both counts only grow, so that an old notice proves it as well.
bool Engine::look_at_order(const std::string& operation) {
  const std::uint64_t mine = besides_.load(std::memory_order_relaxed);
  if (mine == kUncounted) return false;
  if (std::exchange(told_besides_, mine) != mine) tell();
  Apart apart;
  std::vector<int> on_host;
  std::vector<int> on_devices{rank()};
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    const std::uint64_t theirs = besides_from(detail_of(notice));
    if (theirs == kUncounted) continue;
    if (theirs >= mine) {
      on_devices.push_back(peer);
    } else if (notice.sequence > called_.load(std::memory_order_relaxed)) {
      on_host.push_back(peer);
      apart.sequence = notice.sequence;
      apart.descriptor = notice.descriptor;
    }
  }
  if (on_host.empty()) {
    apart_ends_ = 0;
    return false;
  }
  const Nanoseconds now = options_.clock->now();
  if (apart_ends_ == 0) apart_ends_ = later(now, kApartLasts);
  const bool heard_all = on_host.size() + on_devices.size() == links_.size();
  if (!heard_all && now < apart_ends_) return false;
  blame(std::move(on_host), std::move(on_devices), &apart);
  apart.beside = operation;
  // Peers hear with it which collective it is.
  sequence_ = apart.sequence;
  descriptor_ = apart.descriptor;
  give_up(order_verdict(apart, options_.names), apart.odd.front(), to_detail(apart));
  return true;
}

}  // namespace pycoll::runtime
