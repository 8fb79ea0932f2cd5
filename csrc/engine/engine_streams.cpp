// The engine's part of operations on the device stream: what a rank that waits there learns about
// its peers, and what its notices tell them.
#include <algorithm>
#include <string_view>
#include <utility>

#include "engine/diagnosis/notices.h"
#include "engine/engine.h"

namespace pycoll::engine {
namespace {

using transport::Link;
using transport::LinkState;
using transport::Notice;

// Prefix of the detail of a mismatch that a kernel found. The engine's own details describe an
// array.
constexpr std::string_view kOnStream = "on stream: ";

// How long a rank that sees peers in another operation waits for the notices of the other ranks.
constexpr Nanoseconds kApartLasts = 1'000'000'000;

}  // namespace

void Engine::count_on_stream(bool replayable) {
  std::uint64_t count = on_streams_.load(std::memory_order_relaxed);
  while (count != kUncounted &&
         !on_streams_.compare_exchange_weak(count, replayable ? kUncounted : count + 1,
                                            std::memory_order_relaxed)) {
  }
}

// Handles a mismatch about an operation on the device stream; false if the
// notice is of another one.
bool Engine::hear_from_stream(int peer, const Notice& notice) {
  const std::string detail = detail_of(notice);
  if (is_apart(detail)) {
    hear_apart(notice);
  } else if (detail.starts_with(kOnStream)) {
    hear_mismatch(peer, notice);
  } else {
    return false;
  }
  return true;
}

// Kernels know no descriptors, only which rank found a segment of another
// operation and which rank sent it.
void Engine::hear_mismatch(int peer, const Notice& notice) {
  const int culprit = notice.culprit >= 0 && notice.culprit < size() ? notice.culprit : peer;
  give_up(Status::error(Code::kMismatch,
                        detail_of(notice).substr(kOnStream.size()) + ": " +
                            name_rank(peer, options_.names) + " found that " +
                            name_rank(culprit, options_.names) +
                            " is in another operation; all ranks must call alike",
                        {culprit}),
          culprit, detail_of(notice));
}

// Fails with the verdict of the rank that judged.
void Engine::hear_apart(const Notice& notice) {
  const std::string detail = detail_of(notice);
  Apart apart = apart_from(detail, size());
  apart.sequence = sequence_ = notice.sequence;
  apart.descriptor = descriptor_ = notice.descriptor;
  give_up(order_verdict(apart, options_.names), notice.culprit, detail);
}

// Kernels of this rank may not have checked the codes yet, and each rank has its own copy of them.
void Engine::hear_codes(int peer, const Notice& notice) {
  const int culprit = notice.culprit >= 0 && notice.culprit < size() ? notice.culprit : peer;
  give_up(Status::error(Code::kReduction,
                        name_rank(culprit, options_.names) +
                            " sent codes of an array on a device that do not decode: their places "
                            "do not ascend below the length of the array; told by " +
                            name_rank(peer, options_.names),
                        {culprit}),
          culprit, detail_of(notice));
}

void Engine::look_on_stream(const std::string& operation, bool patient) {
  if (!failure_.ok() || closed_) return;
  on_stream_ = operation;
  (void)poll();
  (void)look_at_notices();
  bool over = !failure_.ok() || look_at_refusals_on_stream(operation) || look_at_order(operation);
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
  on_stream_.clear();
}

void Engine::fail_on_stream(const Status& status, const std::string& operation, double after) {
  if (!failure_.ok() || closed_) return;
  const int culprit = status.ranks().empty() ? rank() : status.ranks().front();
  if (status.code() == Code::kTimeout) {
    Overdue overdue;
    overdue.seconds = after;
    overdue.still = status.ranks();
    overdue.on_stream = operation;
    give_up(timeout_verdict(operation, overdue, options_.names), culprit, to_detail(overdue));
  } else if (status.code() == Code::kMismatch) {
    give_up(status, culprit, std::string(kOnStream) + operation);
  } else {
    give_up(status, culprit, status.message());
  }
}

// Checks the order of calls. A peer calls in another order if it has entered a collective that this
// rank has not called, and has called fewer operations on the device stream. Each then waits for
// the other. Both counts only grow, so an old notice proves it as well.
bool Engine::look_at_order(const std::string& operation) {
  const std::uint64_t mine = on_streams_.load(std::memory_order_relaxed);
  if (mine == kUncounted) return false;
  if (std::exchange(told_streams_, mine) != mine) tell();
  Apart apart;
  std::vector<int> on_host;
  std::vector<int> on_devices{rank()};
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    const std::uint64_t theirs = streams_from(detail_of(notice));
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
  apart.on_stream = operation;
  // The notice then also tells peers which collective it is.
  sequence_ = apart.sequence;
  descriptor_ = apart.descriptor;
  give_up(order_verdict(apart, options_.names), apart.odd.front(), to_detail(apart));
  return true;
}

}  // namespace pycoll::engine
