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
  long_ = std::min<std::size_t>(request_.segment_bytes, longest) >= transport::kUncopiedBytesMin;
  const auto collective = static_cast<Collective>(request_.plan->header().collective);
  is_waited_for_ =
      may_split_copies(collective) && bound_.longest_bytes() >= transport::kUncopiedBytesMin;
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
void Execution::open_windows() const {
  for (std::size_t i = 0; i < ports_.size(); ++i) {
    const std::uint64_t uses = offers_ ? direct_writes_->offered[i] : 0;
    transport::WriteWindows* windows = abilities_[i].recv.windows;
    if (windows == nullptr || (uses == 0 && !is_waited_for_)) continue;
    windows->open_window(
        {header_.sequence, header_.agreement, uses, bound_.output(), request_.output.bytes});
  }
}

// Whether this rank, which only sends, must wait until the peer of send number `i` has said whether
// it opens a window.
bool Execution::awaits_answer(const plan::Row& row, int i) const {
  if (!only_sends_ || !is_waited_for_) return false;
  transport::DirectWriter* writer = abilities_[row.send[i]].send.direct_writer;
  return writer != nullptr && !writer->is_answered(header_);
}

// The address in the peer's write window for send number `i` of the row, or nullptr: it
// goes to a slot buffer. Incomplete sums are never written directly, because the
// receiver combines them further. A row that only sends to several peers uses one shared
// copy, which all of them read at the same time.
std::byte* Execution::find_window(const BoundRow& bound, int i, std::size_t skip) const {
  const plan::Row& row = *bound.row;
  if (direct_writes_ == nullptr || header_.bytes < transport::kUncopiedBytesMin) return nullptr;
  const bool complete = plan::operand_count(row) == 1 || (row.flags & plan::kFlagFinal) != 0;
  if (!complete || (row.recv_count == 0 && row.send_count > 1)) return nullptr;
  transport::DirectWriter* writer = abilities_[row.send[i]].send.direct_writer;
  if (writer == nullptr) return nullptr;
  const auto index = static_cast<std::size_t>(&bound - bound_.rows().data());
  return writer->find_window(header_, {direct_writes_->use(index, i), bound.receiver_bytes + skip});
}

}  // namespace pycoll::executor
