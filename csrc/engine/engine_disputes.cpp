// Disagreement of ranks about an operation: how they tell each other what they called, how they
// find the first array in which their calls differ, and the verdict. Nothing here runs while ranks
// agree.
#include <algorithm>

#include "engine/diagnosis/dispute.h"
#include "engine/diagnosis/notices.h"
#include "engine/engine.h"

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

// The arrays of operation `sequence`, if that operation runs; else nullptr.
const CallArrays* Engine::arrays_of(std::uint64_t sequence) const {
  for (std::size_t index = 0; index < running_.size(); ++index) {
    const Running& one = running_[index];
    if (one.pending.sequence != sequence) continue;
    const CallArrays* arrays = one.pending.operation->arrays();
    return arrays != nullptr ? arrays : one.execution->request().arrays.get();
  }
  return nullptr;
}

// Posts the disagreement and this rank's operation at once; from here on no operation moves.
void Engine::disagree(std::uint64_t sequence) {
  // The operation may have begun after the oldest one; then peers must hear of this one.
  for (std::size_t index = 1; index < running_.size(); ++index) {
    if (running_[index].pending.sequence != sequence) continue;
    descriptor_ = running_[index].execution->request().descriptor;
    sequence_ = sequence;
  }
  dispute_ = open_dispute(sequence, arrays_of(sequence_));
  comparing_ = false;
  dispute_ends_ = later(options_.clock->now(), kDisputeLasts);
  disputed_standing_ = {rank(), sequence_, descriptor_};
  announce();
}

std::vector<Standing> Engine::standings() {
  std::vector<Standing> all;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      all.push_back(disputes() ? disputed_standing_ : Standing{peer, sequence_, descriptor_});
      continue;
    }
    const Notice notice = links_[static_cast<std::size_t>(peer)]->newest();
    all.push_back({peer, notice.sequence, notice.descriptor});
    if (notice.dispute.operation != 0) all.back().array = detail_of(notice);
  }
  return all;
}

// Several ranks may have found a disagreement at the same time: all judge the earliest operation.
std::uint64_t Engine::earliest_dispute() {
  std::uint64_t first = dispute_.operation;
  for (Link* link : links_) {
    if (link == nullptr) continue;
    const std::uint64_t told = link->newest().dispute.operation;
    if (told != 0) first = std::min(first, told);
  }
  return first;
}

// Judges when the ranks have found the difference, or when the time for that is over.
void Engine::resolve_disagreement(Nanoseconds now) {
  if (!comparing_) {
    const bool heard_all = std::all_of(links_.begin(), links_.end(), [](Link* link) {
      if (link == nullptr || link->state() != LinkState::kOpen) return true;
      return link->newest().dispute.operation != 0;
    });
    if (!heard_all && now < dispute_ends_) return;
    comparing_ = true;
    dispute_ends_ = later(now, kDisputeLasts);
  }
  const std::uint64_t first = earliest_dispute();
  if (!have_compared(first) && now < dispute_ends_) return;
  sequence_ = disputed_standing_.sequence;  // so that the last notice tells the same
  descriptor_ = disputed_standing_.descriptor;
  const Status verdict = mismatch_verdict(first, standings(), found_equal(dispute_));
  give_up(verdict, verdict.ranks().empty() ? -1 : verdict.ranks().front(),
          disputed_standing_.array.value_or(""));
}

// Takes part in the search as far as the notices of the other ranks allow; true when it is over.
// The ranks that are in the operation search, the others wait for them.
bool Engine::have_compared(std::uint64_t sequence) {
  const bool takes_part = disputed_standing_.sequence == sequence;
  std::vector<Dispute> others;
  std::vector<bool> ended;
  for (Link* link : links_) {
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    if (notice.dispute.operation == 0 || notice.sequence != sequence) continue;
    others.push_back(notice.dispute);
    ended.push_back(failure_of(notice) != Code::kOk || link->state() != LinkState::kOpen);
  }
  const auto newest = std::max_element(
      others.begin(), others.end(),
      [](const Dispute& one, const Dispute& other) { return one.round < other.round; });
  if (takes_part && newest != others.end() && newest->round > dispute_.round) enter(*newest);
  for (std::size_t index = 0; index < others.size(); ++index) {
    const Dispute& one = others[index];
    if (!takes_part && one.width == 0) continue;
    if (takes_part && in_step(one, dispute_)) continue;
    // A rank in an earlier round may follow, unless it has ended.
    return ended[index] || (takes_part && one.round == dispute_.round);
  }
  if (!takes_part || dispute_.width == 0) return true;
  others.push_back(dispute_);
  enter(is_worth_comparing(sequence) ? next_round(others) : end_search(dispute_));
  return false;
}

// Whether arrays can explain the disagreement. Calls of one array each are compared only if all
// else is equal, because the text states the number of elements and their type.
bool Engine::is_worth_comparing(std::uint64_t sequence) {
  const transport::Descriptor& mine = disputed_standing_.descriptor;
  std::uint32_t most = dispute_.arrays;
  bool alike = true;
  for (Link* link : links_) {
    if (link == nullptr) continue;
    const Notice notice = link->newest();
    if (notice.dispute.operation == 0 || notice.sequence != sequence) continue;
    if (notice.descriptor.collective != mine.collective) return false;
    most = std::max(most, notice.dispute.arrays);
    alike = alike && to_text(notice.descriptor) == to_text(mine);
  }
  return alike || most > 1;
}

void Engine::enter(const Dispute& round) {
  const CallArrays* arrays = arrays_of(disputed_standing_.sequence);
  enter_round(round, arrays, &dispute_);
  const bool shown = dispute_.width == 0 && !found_equal(dispute_) && arrays != nullptr;
  disputed_standing_.array =
      shown ? arrays->text(dispute_.begin, sizeof(Notice::detail) - 1) : std::string();
  tell();
}

}  // namespace pycoll::engine
