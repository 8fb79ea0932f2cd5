#include "executor/wire_memory.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/bytes.h"

namespace pycoll::executor {
namespace {

// Most bytes of wire elements that one conversion step makes. Between steps the rank checks other
// events.
constexpr std::uint64_t kStepBytes = 1 << 20;
constexpr std::size_t kAlignment = 64;

}  // namespace

Status WireMemory::bind(CollectiveRequest* request) {
  form_ = request->form;
  if (!is_used()) return Status();
  const std::size_t item = item_bytes(request->descriptor.dtype);
  group_bytes_ = item * form_.array_items;
  wire_bytes_ = item_bytes(form_.dtype) * form_.wire_items;
  for (std::uint64_t& count : request->counts) {
    if (count % form_.array_items != 0 || count > UINT64_MAX / form_.wire_items) {
      return Status::error(Code::kInvalidArgument,
                           "a block has " + std::to_string(count) + " elements: op " +
                               std::string(name_of(request->descriptor.op)) + " takes groups of " +
                               std::to_string(form_.array_items));
    }
    count = count / form_.array_items * form_.wire_items;
  }
  if (request->input.bytes % group_bytes_ != 0 || request->output.bytes % group_bytes_ != 0) {
    return Status::error(Code::kInvalidArgument,
                         "input has " + std::to_string(request->input.bytes) + " bytes, output " +
                             std::to_string(request->output.bytes) + ": expected multiples of " +
                             std::to_string(group_bytes_));
  }
  input_groups_ = request->input.bytes / group_bytes_;
  output_groups_ = request->output.bytes / group_bytes_;
  ranks_ = request->plan->contributors();
  is_list_ = !request->parts.empty();
  parts_ = std::move(request->parts);
  request->parts.clear();
  if (!is_list_) {
    parts_ = {{nullptr, nullptr, std::max(request->input.bytes, request->output.bytes)}};
  }
  const std::uint64_t input_bytes = input_groups_ * wire_bytes_;
  const std::uint64_t output_bytes = output_groups_ * wire_bytes_;
  // With one block, input and output hold the same elements.
  const bool shared = request->plan->header().block_count == 1;
  const std::uint64_t behind = shared ? 0 : round_up(input_bytes, kAlignment);
  reserve(shared ? std::max(input_bytes, output_bytes) : behind + output_bytes);
  input_ = memory_.get() + padding_;
  output_ = input_ + behind;
  request->combine = form_.combine;
  request->input = {input_, input_bytes};
  request->output = {output_, output_bytes};
  return Status();
}

// The memory is not zeroed: every element is written, by enter_some() or a row, before it is read.
void WireMemory::reserve(std::uint64_t bytes) {
  if (bytes > capacity_ || memory_ == nullptr) {
    memory_.reset();
    memory_.reset(new std::byte[bytes + kAlignment]);
    capacity_ = bytes;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
  padding_ = round_up(address, kAlignment) - address;
}

void WireMemory::begin(const std::byte** input, std::byte** output) {
  if (!is_list_) {
    parts_.front().input = *input;
    parts_.front().output = *output;
  }
  entered_ = left_ = 0;
  entering_ = leaving_ = parts_.begin();
  *input = input_;
  *output = output_;
}

// Returns the contiguous groups behind the first `done` of `all`, at most one step of them. Moves
// `*part` to the array that holds them.
WireMemory::Run WireMemory::next_run(std::vector<Part>::const_iterator* part, std::uint64_t done,
                                     std::uint64_t all) const {
  if (done * group_bytes_ == (*part)->end) ++*part;
  const std::uint64_t begin = *part == parts_.begin() ? 0 : std::prev(*part)->end;
  const std::uint64_t end = std::min((*part)->end / group_bytes_, all);
  return {std::min(end - done, std::max<std::uint64_t>(1, kStepBytes / wire_bytes_)),
          done * group_bytes_ - begin};
}

bool WireMemory::enter_some() {
  for (std::uint64_t most = entered_ + kStepBytes / wire_bytes_;
       entered_ < input_groups_ && entered_ < most;) {
    const Run run = next_run(&entering_, entered_, input_groups_);
    form_.enter(input_ + entered_ * wire_bytes_, entering_->input + run.skip, run.groups, ranks_);
    entered_ += run.groups;
  }
  return entered_ == input_groups_;
}

bool WireMemory::leave_some() {
  for (std::uint64_t most = left_ + kStepBytes / wire_bytes_;
       left_ < output_groups_ && left_ < most;) {
    const Run run = next_run(&leaving_, left_, output_groups_);
    form_.leave(leaving_->output + run.skip, output_ + left_ * wire_bytes_, run.groups, ranks_);
    left_ += run.groups;
  }
  if (left_ != output_groups_) return false;
  if (capacity_ > kKeptBytes) {
    memory_.reset();
    capacity_ = 0;
  }
  return true;
}

}  // namespace pycoll::executor
