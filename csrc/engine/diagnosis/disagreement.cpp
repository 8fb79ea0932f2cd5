#include "engine/diagnosis/disagreement.h"

#include <algorithm>

#include "engine/diagnosis/dispute.h"
#include "engine/diagnosis/notices.h"

namespace pycoll::engine {
namespace {

using executor::CallArrays;
using transport::Dispute;
using transport::Link;
using transport::LinkState;
using transport::Notice;

// How long a rank that found a disagreement waits for the descriptions of the others, and how long
// it then searches with them for the difference.
constexpr Nanoseconds kDisputeLasts = 1'000'000'000;

}  // namespace

// The operation may have begun after the oldest one; then peers must hear of this one.
void Disagreement::open(std::uint64_t sequence) {
  collectives_.hold(sequence);
  Findings& findings = report_.findings();
  findings.dispute = open_dispute(sequence, collectives_.arrays_of(collectives_.sequence()));
  comparing_ = false;
  ends_ = later(peers_.clock().now(), kDisputeLasts);
  findings.disputed = {peers_.rank(), collectives_.sequence(), collectives_.descriptor()};
  report_.announce();
}

std::vector<Standing> Disagreement::standings() const {
  std::vector<Standing> all;
  for (int peer = 0; peer < peers_.size(); ++peer) {
    Link* link = peers_.links()[static_cast<std::size_t>(peer)];
    if (link == nullptr) {
      all.push_back(report_.findings().disputed);
      continue;
    }
    const Notice notice = link->newest();
    all.push_back({peer, notice.sequence, notice.descriptor});
    if (notice.dispute.operation != 0) all.back().array = detail_of(notice);
  }
  return all;
}

// Several ranks may have found a disagreement at the same time: all judge the earliest operation.
std::uint64_t Disagreement::earliest() const {
  std::uint64_t first = report_.findings().dispute.operation;
  for (Link* link : peers_.links()) {
    if (link == nullptr) continue;
    const std::uint64_t told = link->newest().dispute.operation;
    if (told != 0) first = std::min(first, told);
  }
  return first;
}

void Disagreement::resolve(Nanoseconds now) {
  if (!comparing_) {
    const auto& links = peers_.links();
    const bool heard_all = std::all_of(links.begin(), links.end(), [](Link* link) {
      if (link == nullptr || link->state() != LinkState::kOpen) return true;
      return link->newest().dispute.operation != 0;
    });
    if (!heard_all && now < ends_) return;
    comparing_ = true;
    ends_ = later(now, kDisputeLasts);
  }
  const std::uint64_t first = earliest();
  if (!have_compared(first) && now < ends_) return;
  const Findings& findings = report_.findings();
  const Status verdict = mismatch_verdict(first, standings(), found_equal(findings.dispute));
  const Standing told = findings.disputed;  // so that the last notice tells the same
  report_.give_up(verdict, verdict.ranks().empty() ? -1 : verdict.ranks().front(),
                  told.array.value_or(""), told);
}

// Takes part in the search as far as the notices of the other ranks allow; true when it is over.
// The ranks that are in the operation search, the others wait for them.
bool Disagreement::have_compared(std::uint64_t sequence) {
  const Findings& findings = report_.findings();
  const bool takes_part = findings.disputed.sequence == sequence;
  std::vector<Dispute> others;
  std::vector<bool> ended;
  for (Link* link : peers_.links()) {
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    if (notice.dispute.operation == 0 || notice.sequence != sequence) continue;
    others.push_back(notice.dispute);
    ended.push_back(failure_of(notice) != Code::kOk || link->state() != LinkState::kOpen);
  }
  const auto newest = std::max_element(
      others.begin(), others.end(),
      [](const Dispute& one, const Dispute& other) { return one.round < other.round; });
  if (takes_part && newest != others.end() && newest->round > findings.dispute.round) {
    enter(*newest);
  }
  for (std::size_t index = 0; index < others.size(); ++index) {
    const Dispute& one = others[index];
    if (!takes_part && one.width == 0) continue;
    if (takes_part && in_step(one, findings.dispute)) continue;
    // A rank in an earlier round may follow, unless it has ended.
    return ended[index] || (takes_part && one.round == findings.dispute.round);
  }
  if (!takes_part || findings.dispute.width == 0) return true;
  others.push_back(findings.dispute);
  enter(is_worth_comparing(sequence) ? next_round(others) : end_search(findings.dispute));
  return false;
}

// Whether arrays can explain the disagreement. Calls of one array each are compared only if all
// else is equal, because the text states the number of elements and their type.
bool Disagreement::is_worth_comparing(std::uint64_t sequence) const {
  const transport::Descriptor& mine = report_.findings().disputed.descriptor;
  std::uint32_t most = report_.findings().dispute.arrays;
  bool alike = true;
  for (Link* link : peers_.links()) {
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    if (notice.dispute.operation == 0 || notice.sequence != sequence) continue;
    if (notice.descriptor.collective != mine.collective) return false;
    most = std::max(most, notice.dispute.arrays);
    alike = alike && to_text(notice.descriptor) == to_text(mine);
  }
  return alike || most > 1;
}

void Disagreement::enter(const Dispute& round) {
  Findings& findings = report_.findings();
  const CallArrays* arrays = collectives_.arrays_of(findings.disputed.sequence);
  enter_round(round, arrays, &findings.dispute);
  const Dispute& dispute = findings.dispute;
  const bool shown = dispute.width == 0 && !found_equal(dispute) && arrays != nullptr;
  findings.disputed.array =
      shown ? arrays->text(dispute.begin, sizeof(Notice::detail) - 1) : std::string();
  report_.tell();
}

}  // namespace pycoll::engine
