// Direct writes: the sender writes a segment to where the receiver's row would copy
// it. The plan must allow it (flag 8 in FORMAT.md), the medium must support it, and
// the receiver must have opened a write window.
#include "executor/execution.h"
#include "executor/execution_row.h"

namespace pycoll::executor {

void Execution::find_direct_writes() {
  long_ = bound_.longest_bytes() >= transport::kUncopiedBytesMin;
  direct_writes_ = long_ ? &request_.plan->direct_writes() : nullptr;
  opens_windows_ = long_ && request_.parts.empty();
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

// Opens the write windows. Where the plan announces them, senders wait for that, so this rank also
// says that there is none.
void Execution::open_windows() const {
  for (std::size_t i = 0; i < ports_.size(); ++i) {
    transport::WriteWindows* windows = abilities_[i].recv.windows;
    const std::uint64_t uses = opens_windows_ ? direct_writes_->window_uses[i] : 0;
    if (windows == nullptr || (uses == 0 && !direct_writes_->announced[i])) continue;
    windows->open_window(
        {header_.sequence, header_.agreement, uses, bound_.output(), request_.output.bytes});
  }
}

// Whether send number `i` of the row must wait until its peer has said whether it opens a window.
bool Execution::awaits_answer(const plan::Row& row, int i) const {
  if ((row.flags & plan::kFlagAwaitWindow) == 0) return false;
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
  // A row that combines has read the peers' inputs, which are their outputs if the call is in place
  // on all ranks.
  const bool cached = plan::operand_count(row) > 1 && bound_.input() == bound_.output();
  return writer->find_window(header_,
                             {direct_writes_->use(index, i), bound.receiver_bytes + skip, cached});
}

}  // namespace pycoll::executor
