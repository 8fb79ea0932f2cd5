// Refused collectives: how the peers of a rank that has refused its arguments hear of it, and how
// they end what they have begun.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "engine/diagnosis/notices.h"
#include "engine/engine.h"

namespace pycoll::engine {
namespace {

using transport::Link;
using transport::Notice;
using transport::Numbers;
using transport::Refusals;

// How long a rank that a peer has overtaken in an operation waits to hear the reason.
constexpr Nanoseconds kOvertakenLasts = 1'000'000'000;

bool refuses(const Refusals& refusals, std::uint64_t sequence) {
  return std::any_of(std::begin(refusals.ranges), std::end(refusals.ranges),
                     [sequence](const Numbers& one) { return one.contains(sequence); });
}

std::uint64_t newest_of(const Refusals& refusals) {
  std::uint64_t newest = 0;
  for (const Numbers& one : refusals.ranges) newest = std::max(newest, one.last);
  return newest;
}

// The reason that a peer gives for its refusal of an operation.
std::string why_of(const Refusals& refusals, std::uint64_t sequence) {
  std::string why = printable(refusals.why, sizeof(refusals.why));
  const std::uint64_t newest = call_of(newest_of(refusals));
  if (call_of(sequence) == newest) return why;
  return "the last of several refusals, operation " + std::to_string(newest) + ": " + why;
}

}  // namespace

void Engine::refuse(const std::string& why) {
  if (!failure_.ok() || closed_) return;
  const std::uint64_t first = next_sequence();
  const std::uint64_t last = next_call(first) - 1;
  called_.store(last, std::memory_order_relaxed);
  tell_refused({first, last}, why);
}

// Ranges are kept until all peers have heard of them. An operation Call::kRunsMax calls later ends
// well only after all ranks have begun it, and they have then ended the refused one.
void Engine::tell_refused(Numbers numbers, const std::string& why) {
  dropped_.add(numbers);
  Numbers* const begin = refusals_.ranges;
  Numbers* const end = begin + Refusals::kRangesMax;
  Numbers* place = std::find_if(begin, end, [](const Numbers& one) { return one.first == 0; });
  if (place != begin && place[-1].last + 1 == numbers.first) {
    place[-1].last = numbers.last;
  } else {
    if (place == end) {
      if (call_of(begin->last) + Call::kRunsMax > call_of(completed_)) {
        give_up(
            Status::error(Code::kInvalidArgument,
                          name_rank(rank(), options_.names) +
                              " has refused operations faster than other ranks can hear: " + why,
                          {rank()}),
            rank(), why);
        return;
      }
      place = std::move(begin + 1, end, begin);
    }
    *place = numbers;
  }
  std::snprintf(refusals_.why, sizeof(refusals_.why), "%s", why.c_str());
  if (why.size() >= sizeof(refusals_.why)) {
    std::copy_n("...", 4, std::end(refusals_.why) - 4);
  }
  tell();
}

// Handles one operation at a time; later ones are checked when they are the oldest.
bool Engine::look_at_refusals() {
  if (running_.empty() || disputes()) return false;
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Refusals refusals = link->newest().refusals;
    if (!refuses(refusals, sequence_)) continue;
    drop_oldest(peer, refusals);
    return true;
  }
  return false;
}

void Engine::drop_oldest(int peer, const Refusals& refusals) {
  const std::string why = why_of(refusals, sequence_);
  const Status status = refusal_verdict(peer, sequence_, why, options_.names);
  Running& oldest = running_.front();
  const CollectiveRequest& request = oldest.execution->request();
  const bool bound = oldest.pending.call != nullptr;
  const std::byte* input = bound ? oldest.pending.input : request.input.data;
  const std::byte* output = bound ? oldest.pending.output : request.output.data;
  for (const auto& medium : options_.transports) medium->let_go(transport::LetGo::kHandedOver);
  bool may_drop = oldest.execution->can_drop(input, output);
  // Operations that began after this one have counted it, and the order of their
  // segments depends on the count.
  for (std::size_t index = 1; index < running_.size() && oldest.execution->traversals(); ++index) {
    may_drop &= !running_[index].execution->traversals();
  }
  if (!may_drop) {
    give_up(status, peer, why);
    return;
  }
  for (const Numbers& one : refusals.ranges) {
    if (one.contains(sequence_)) dropped_.add(one);
  }
  oldest.execution->drop();
  const Running ended = running_.pop();
  if (ended.busy != nullptr) *ended.busy = false;
  if (!running_.empty()) select_oldest();
  ended.pending.operation->finish(status);
  begin_next();
}

// Fails with the reason of a rank that could not continue.
void Engine::hear_refusal(int peer, const Notice& notice) {
  const int culprit = notice.culprit >= 0 && notice.culprit < size() ? notice.culprit : peer;
  give_up(refusal_verdict(culprit, notice.sequence, detail_of(notice), options_.names), culprit,
          detail_of(notice));
}

// A peer that has ended the operation in which this rank waits has heard of a refusal. That notice
// may arrive here later than the peer's segments. If none arrives, the ranks disagree.
void Engine::look_at_overtaking(Nanoseconds now) {
  if (disputes() || running_.empty() || !running_.front().execution->is_overtaken()) {
    overtaken_ends_ = 0;
  } else if (overtaken_ends_ == 0) {
    overtaken_ends_ = later(now, kOvertakenLasts);
  } else if (now >= overtaken_ends_) {
    overtaken_ends_ = 0;
    disagree(sequence_);
  }
}

// Checks for a refusal of the operation on the device stream in which this rank waits. A peer has
// refused it if it has refused the next collective of this rank and has called fewer operations on
// the device stream. A running kernel cannot be cancelled, so the communicator fails.
bool Engine::look_at_refusals_on_stream(const std::string& operation) {
  const std::uint64_t mine = on_streams_.load(std::memory_order_relaxed);
  if (mine == kUncounted) return false;
  const std::uint64_t next = next_call(called_.load(std::memory_order_relaxed));
  for (int peer = 0; peer < size(); ++peer) {
    Link* link = links_[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    const std::uint64_t theirs = streams_from(detail_of(notice));
    if (theirs == kUncounted || theirs >= mine || !refuses(notice.refusals, next)) continue;
    const std::string why = why_of(notice.refusals, next);
    std::string text = name_rank(peer, options_.names) + " has refused its arguments of ";
    text.append(operation).append(": ").append(why);
    give_up(Status::error(Code::kInvalidArgument, std::move(text), {peer}), peer, why);
    return true;
  }
  return false;
}

}  // namespace pycoll::engine
