// Direct writes: the sender writes a segment to where the receiver's row would copy
// it. The plan must allow it (flag 8 in FORMAT.md), the medium must support it, and
// the receiver must have offered a write window.
#include <algorithm>

#include "executor/execution.h"
#include "executor/execution_row.h"

namespace pycoll::executor {

void Execution::find_direct_writes() {
  offers_ = false;
  direct_writes_ = nullptr;
  const std::size_t longest = std::max(request_.input.bytes, request_.output.bytes);
  long_ = std::min<std::size_t>(request_.segment_bytes, longest) >= transport::kPlacedBytesMin;
  const auto collective = static_cast<Collective>(request_.plan->header().collective);
  is_waited_for_ =
      may_split_copies(collective) && bound_.longest_bytes() >= transport::kPlacedBytesMin;
  if (!long_) return;
  direct_writes_ = &request_.plan->direct_writes();
  offers_ = request_.parts.empty() &&
            std::any_of(direct_writes_->offered.begin(), direct_writes_->offered.end(),
                        [](std::uint64_t uses) { return uses != 0; });
}

// Pins the arena memory that peers may read or write before this operation has ended.
void Execution::hold_memory(const std::byte* input, const std::byte* output) {
  held_.clear();
  const auto hold = [this](const std::byte* from, const std::byte* to) {
    held_.emplace_back(from);
    if (to != from) held_.emplace_back(to);
  };
  if (request_.parts.empty()) return hold(input, output);
  for (const Part& part : request_.parts) hold(part.input, part.output);
}

// Announces the write windows. A sender that waits for
// an answer gets one even if there is no window.
void Execution::make_offers() const {
  for (std::size_t i = 0; i < ports_.size(); ++i) {
    const std::uint64_t uses = offers_ ? direct_writes_->offered[i] : 0;
    if (ports_[i].recv == nullptr || (uses == 0 && !is_waited_for_)) continue;
    ports_[i].recv->offer(
        {header_.sequence, header_.agreement, uses, bound_.output(), request_.output.bytes});
  }
}

// The address in the peer's write window for send number `i` of the row, or nullptr: it
// goes to a slot buffer. Incomplete sums are never written directly, because the
// receiver combines them further. A row that only sends to several peers uses one shared
// copy, which all of them read at the same time.
std::byte* Execution::offered(const BoundRow& bound, int i, std::size_t skip) const {
  const plan::Row& row = *bound.row;
  if (direct_writes_ == nullptr || header_.bytes < transport::kPlacedBytesMin) return nullptr;
  const bool complete = plan::operand_count(row) == 1 || (row.flags & plan::kFlagFinal) != 0;
  if (!complete || (row.recv_count == 0 && row.send_count > 1)) return nullptr;
  transport::SendChannel& channel = *ports_[row.send[i]].send;
  const auto index = static_cast<std::size_t>(&bound - bound_.rows().data());
  return channel.offered(header_, {direct_writes_->use(index, i), bound.receiver_bytes + skip});
}

}  // namespace pycoll::executor
