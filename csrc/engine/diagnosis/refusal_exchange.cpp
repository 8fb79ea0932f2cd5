#include "engine/diagnosis/refusal_exchange.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "engine/diagnosis/notices.h"

namespace pycoll::engine {
namespace {

using transport::Link;
using transport::Notice;
using transport::Refusals;

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

// Ranges are kept until all peers have heard of them. An operation Call::kRunsMax calls later ends
// well only after all ranks have begun it, and they have then ended the refused one.
void RefusalExchange::tell(Numbers numbers, const std::string& why) {
  operations_.collectives.ignore(numbers);
  Refusals& refusals = report_.findings().refusals;
  Numbers* const begin = refusals.ranges;
  Numbers* const end = begin + Refusals::kRangesMax;
  Numbers* place = std::find_if(begin, end, [](const Numbers& one) { return one.first == 0; });
  if (place != begin && place[-1].last + 1 == numbers.first) {
    place[-1].last = numbers.last;
  } else {
    if (place == end) {
      if (call_of(begin->last) + Call::kRunsMax > call_of(operations_.collectives.completed())) {
        const Peers& peers = operations_.peers;
        report_.give_up(
            Status::error(Code::kInvalidArgument,
                          name_rank(peers.rank(), peers.names()) +
                              " has refused operations faster than other ranks can hear: " + why,
                          {peers.rank()}),
            peers.rank(), why);
        return;
      }
      place = std::move(begin + 1, end, begin);
    }
    *place = numbers;
  }
  std::snprintf(refusals.why, sizeof(refusals.why), "%s", why.c_str());
  if (why.size() >= sizeof(refusals.why)) {
    std::copy_n("...", 4, std::end(refusals.why) - 4);
  }
  report_.tell();
}

void RefusalExchange::tell_invalid() {
  while (const auto refused = operations_.collectives.take_refused()) {
    tell({refused->sequence, refused->sequence}, refused->why);
    if (report_.is_over()) return;
    operations_.collectives.begin_next();
  }
}

bool RefusalExchange::look() {
  if (operations_.collectives.idle() || report_.findings().disputes()) return false;
  const Peers& peers = operations_.peers;
  for (int peer = 0; peer < peers.size(); ++peer) {
    Link* link = peers.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Refusals refusals = link->newest().refusals;
    if (!refuses(refusals, operations_.collectives.sequence())) continue;
    drop_oldest(peer, refusals);
    return true;
  }
  return false;
}

void RefusalExchange::drop_oldest(int peer, const Refusals& refusals) {
  Collectives& collectives = operations_.collectives;
  const std::uint64_t sequence = collectives.sequence();
  const std::string why = why_of(refusals, sequence);
  const Status status = refusal_verdict(peer, sequence, why, operations_.peers.names());
  operations_.peers.let_go(transport::LetGo::kHandedOver);
  if (!collectives.may_drop_oldest()) return report_.give_up(status, peer, why);
  for (const Numbers& one : refusals.ranges) {
    if (one.contains(sequence)) collectives.ignore(one);
  }
  collectives.drop_oldest(status);
  tell_invalid();
}

void RefusalExchange::hear(int peer, const Notice& notice) {
  const Peers& peers = operations_.peers;
  const int culprit = notice.culprit >= 0 && notice.culprit < peers.size() ? notice.culprit : peer;
  report_.give_up(refusal_verdict(culprit, notice.sequence, detail_of(notice), peers.names()),
                  culprit, detail_of(notice));
}

// A peer has refused the operation if it has refused the next collective of this rank and has
// called fewer operations on the device stream. A running kernel cannot be cancelled, so the
// communicator fails.
bool RefusalExchange::look_on_stream(const std::string& operation) {
  const std::uint64_t mine = operations_.numbers.on_stream();
  if (mine == kUncounted) return false;
  const std::uint64_t next = next_call(operations_.numbers.newest());
  const Peers& peers = operations_.peers;
  for (int peer = 0; peer < peers.size(); ++peer) {
    Link* link = peers.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    const std::uint64_t theirs = streams_from(detail_of(notice));
    if (theirs == kUncounted || theirs >= mine || !refuses(notice.refusals, next)) continue;
    const std::string why = why_of(notice.refusals, next);
    std::string text = name_rank(peer, peers.names()) + " has refused its arguments of ";
    text.append(operation).append(": ").append(why);
    report_.give_up(Status::error(Code::kInvalidArgument, std::move(text), {peer}), peer, why);
    return true;
  }
  return false;
}

}  // namespace pycoll::engine
