// Segments that their sender puts where the receiver's row would copy them: what plans allow
// (`land` in FORMAT.md), media can do, and both ends have agreed on by an offer.
#include <algorithm>

#include "runtime/execution.h"
#include "runtime/execution_row.h"

namespace pycoll::runtime {

void Execution::find_landings() {
  offers_ = false;
  landings_ = nullptr;
  const std::size_t longest = std::max(request_.input.bytes, request_.output.bytes);
  long_ = std::min<std::size_t>(request_.segment_bytes, longest) >= transport::kPlacedBytesMin;
  const auto collective = static_cast<Collective>(request_.plan->header().collective);
  is_awaited_ = is_shared(collective) && bound_.longest_bytes() >= transport::kPlacedBytesMin;
  if (!long_) return;
  landings_ = &request_.plan->landings();
  offers_ =
      request_.parts.empty() && std::any_of(landings_->offered.begin(), landings_->offered.end(),
                                            [](std::uint64_t uses) { return uses != 0; });
}

// What peers may read or write before this has ended.
void Execution::hold_memory(const std::byte* input, const std::byte* output) {
  held_.clear();
  const auto hold = [this](const std::byte* from, const std::byte* to) {
    held_.emplace_back(from);
    if (to != from) held_.emplace_back(to);
  };
  if (request_.parts.empty()) return hold(input, output);
  for (const Part& part : request_.parts) hold(part.input, part.output);
}

// Who may be waiting for an answer gets one in any case.
void Execution::make_offers() const {
  for (std::size_t i = 0; i < ports_.size(); ++i) {
    const std::uint64_t uses = offers_ ? landings_->offered[i] : 0;
    if (ports_[i].recv == nullptr || (uses == 0 && !is_awaited_)) continue;
    ports_[i].recv->offer(
        {header_.sequence, header_.agreement, uses, bound_.output(), request_.output.bytes});
  }
}

// Where the row's send number `i` is to be put instead of into its room; nullptr: nowhere. Sums
// that are not complete are combined further and never land. Of what a row only hands on one copy
// for all is enough, which they fetch side by side.
std::byte* Execution::offered(const BoundRow& bound, int i, std::size_t skip) const {
  const plan::Row& row = *bound.row;
  if (landings_ == nullptr || header_.bytes < transport::kPlacedBytesMin) return nullptr;
  const bool complete = plan::operand_count(row) == 1 || (row.flags & plan::kFlagFinal) != 0;
  if (!complete || (row.recv_count == 0 && row.send_count > 1)) return nullptr;
  transport::SendChannel& channel = *ports_[row.send[i]].send;
  const auto index = static_cast<std::size_t>(&bound - bound_.rows().data());
  return channel.offered(header_, {landings_->use(index, i), bound.landing + skip});
}

}  // namespace pycoll::runtime
