#include "engine/diagnosis/stream_order.h"

#include <string_view>
#include <utility>
#include <vector>

#include "engine/diagnosis/notices.h"

namespace pycoll::engine {
namespace {

using transport::Link;
using transport::Notice;

// Prefix of the detail of a mismatch that a kernel found. The engine's own details describe an
// array.
constexpr std::string_view kOnStream = "on stream: ";

// How long a rank that sees peers in another operation waits for the notices of the other ranks.
constexpr Nanoseconds kApartLasts = 1'000'000'000;

}  // namespace

void StreamOrder::fail(const Status& status, const std::string& operation, double after) {
  const Peers& peers = operations_.peers;
  const int culprit = status.ranks().empty() ? peers.rank() : status.ranks().front();
  if (status.code() == Code::kTimeout) {
    Overdue overdue;
    overdue.seconds = after;
    overdue.still = status.ranks();
    overdue.on_stream = operation;
    report_.give_up(timeout_verdict(operation, overdue, peers.names()), culprit,
                    to_detail(overdue));
  } else if (status.code() == Code::kMismatch) {
    report_.give_up(status, culprit, std::string(kOnStream) + operation);
  } else {
    report_.give_up(status, culprit, status.message());
  }
}

bool StreamOrder::hear(int peer, const Notice& notice) {
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
void StreamOrder::hear_mismatch(int peer, const Notice& notice) {
  const Peers& peers = operations_.peers;
  const int culprit = notice.culprit >= 0 && notice.culprit < peers.size() ? notice.culprit : peer;
  report_.give_up(Status::error(Code::kMismatch,
                                detail_of(notice).substr(kOnStream.size()) + ": " +
                                    name_rank(peer, peers.names()) + " found that " +
                                    name_rank(culprit, peers.names()) +
                                    " is in another operation; all ranks must call alike",
                                {culprit}),
                  culprit, detail_of(notice));
}

// Fails with the verdict of the rank that judged.
void StreamOrder::hear_apart(const Notice& notice) {
  const Peers& peers = operations_.peers;
  const std::string detail = detail_of(notice);
  Apart apart = apart_from(detail, peers.size());
  apart.sequence = notice.sequence;
  apart.descriptor = notice.descriptor;
  report_.give_up(order_verdict(apart, peers.names()), notice.culprit, detail,
                  Standing{peers.rank(), apart.sequence, apart.descriptor});
}

void StreamOrder::hear_codes(int peer, const Notice& notice) {
  const Peers& peers = operations_.peers;
  const int culprit = notice.culprit >= 0 && notice.culprit < peers.size() ? notice.culprit : peer;
  report_.give_up(
      Status::error(Code::kReduction,
                    name_rank(culprit, peers.names()) +
                        " sent codes of an array on a device that do not decode: their places "
                        "do not ascend below the length of the array; told by " +
                        name_rank(peer, peers.names()),
                    {culprit}),
      culprit, detail_of(notice));
}

// Both counts only grow, so an old notice proves another order as well.
bool StreamOrder::look(const std::string& operation) {
  const std::uint64_t mine = operations_.numbers.on_stream();
  if (mine == kUncounted) return false;
  if (std::exchange(told_, mine) != mine) report_.tell();
  const Peers& peers = operations_.peers;
  Apart apart;
  std::vector<int> on_host;
  std::vector<int> on_devices{peers.rank()};
  for (int peer = 0; peer < peers.size(); ++peer) {
    Link* link = peers.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    const std::uint64_t theirs = streams_from(detail_of(notice));
    if (theirs == kUncounted) continue;
    if (theirs >= mine) {
      on_devices.push_back(peer);
    } else if (notice.sequence > operations_.numbers.newest()) {
      on_host.push_back(peer);
      apart.sequence = notice.sequence;
      apart.descriptor = notice.descriptor;
    }
  }
  if (on_host.empty()) {
    ends_ = 0;
    return false;
  }
  const Nanoseconds now = peers.clock().now();
  if (ends_ == 0) ends_ = later(now, kApartLasts);
  const bool heard_all = on_host.size() + on_devices.size() == peers.links().size();
  if (!heard_all && now < ends_) return false;
  blame(std::move(on_host), std::move(on_devices), &apart);
  apart.on_stream = operation;
  // The notice then also tells peers which collective it is.
  report_.give_up(order_verdict(apart, peers.names()), apart.odd.front(), to_detail(apart),
                  Standing{peers.rank(), apart.sequence, apart.descriptor});
  return true;
}

}  // namespace pycoll::engine
