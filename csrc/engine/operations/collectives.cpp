#include "engine/operations/collectives.h"

#include <algorithm>

#include "base/assert.h"

namespace pycoll::engine {
namespace {

// Whether a long operation may run at the same time as others. Operations with servers do: while a
// worker receives the last results of one, its outgoing link carries the values of the next.
// Operations with a wire form do not: own_execution_ keeps the memory for the conversion.
bool overlaps_others(const CollectiveRequest& request) {
  return request.plan->header().servers != 0 && request.parts.empty() && !request.form;
}

// Whether the ranges [one, one + one_bytes) and [other, other + other_bytes) overlap.
bool overlap(const std::byte* one, std::uint64_t one_bytes, const std::byte* other,
             std::uint64_t other_bytes) {
  return one_bytes != 0 && other_bytes != 0 && one < other + other_bytes && other < one + one_bytes;
}

}  // namespace

Collectives::Collectives(Peers& peers, CallNumbers& numbers)
    : peers_(peers), numbers_(numbers), tickets_(static_cast<std::size_t>(peers.size())) {}

Status Collectives::fits(const CollectiveRequest& request) const {
  const plan::Header& header = request.plan->header();
  if (header.size == static_cast<std::uint32_t>(peers_.size()) &&
      header.rank == static_cast<std::uint32_t>(peers_.rank())) {
    return Status();
  }
  return Status::error(Code::kInvalidArgument,
                       "the plan is for rank " + std::to_string(header.rank) + " of " +
                           std::to_string(header.size) + ", this is rank " +
                           std::to_string(peers_.rank()) + " of " + std::to_string(peers_.size()));
}

std::shared_ptr<Operation> Collectives::start(CollectiveRequest request, Nanoseconds timeout) {
  auto operation = std::make_shared<Operation>();
  if (!failure_.ok()) {
    operation->finish(failure_);
    return operation;
  }
  if (overlaps_others(request)) {
    const std::byte* input = request.input.data;
    std::byte* output = request.output.data;
    start(std::make_shared<Call>(std::move(request), false), input, output, operation, timeout);
    return operation;
  }
  Pending pending{nullptr, nullptr, nullptr, operation, timeout, numbers_.next()};
  if (running_.empty()) {
    begin(std::move(pending), &request);
  } else {
    queue_.push({std::move(pending), std::make_unique<CollectiveRequest>(std::move(request))});
  }
  note_vacancy();
  return operation;
}

void Collectives::start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
                        std::shared_ptr<Operation> operation, Nanoseconds timeout) {
  if (!failure_.ok()) {
    operation->finish(failure_);
    return;
  }
  Pending pending{std::move(call), input, output, std::move(operation), timeout, numbers_.next()};
  if (queue_.empty() && may_begin(pending)) {
    begin(std::move(pending), nullptr);
  } else {
    queue_.push({std::move(pending), nullptr});
  }
  note_vacancy();
}

// Whether the collective may run concurrently with those that run. Only calls may, and only if
// their memory does not depend on the end of the others.
bool Collectives::may_begin(const Pending& pending) const {
  if (running_.empty()) return true;
  if (pending.call == nullptr || !runs_call() || running_.size() == Call::kRunsMax || held_) {
    return false;
  }
  const std::uint64_t input_bytes = pending.call->request().input.bytes;
  const std::uint64_t output_bytes = pending.call->request().output.bytes;
  for (std::size_t index = 0; index < running_.size(); ++index) {
    const Pending& other = running_[index].pending;
    const CollectiveRequest& known = other.call->request();
    if (overlap(pending.input, input_bytes, other.output, known.output.bytes) ||
        overlap(pending.output, output_bytes, other.input, known.input.bytes) ||
        overlap(pending.output, output_bytes, other.output, known.output.bytes)) {
      return false;
    }
  }
  return true;
}

// Adds the collective to those that run; an invalid request is refused.
void Collectives::begin(Pending&& pending, CollectiveRequest* request) {
  Running entering{std::move(pending)};
  if (const Status status = enter(entering, request); !status.ok()) {
    refused_ = {entering.pending.sequence, status.message()};
    entering.pending.operation->finish(
        Status::error(status.code(), status.message(), {peers_.rank()}, status.how()));
    return;
  }
  running_.push(std::move(entering));
  if (running_.size() == 1) select_oldest();
}

// Makes the oldest running collective the one that notices and deadlines concern.
void Collectives::select_oldest() {
  sequence_ = running_.front().pending.sequence;
  descriptor_ = running_.front().execution->request().descriptor;
  wait_.announced = false;
  wait_.began = 0;  // the clock is read only when this rank has to wait
}

Status Collectives::enter(Running& entering, CollectiveRequest* request) {
  Pending& pending = entering.pending;
  if (pending.call == nullptr) {
    PYCOLL_ASSERT(request != nullptr, "operation %llu is neither a call nor a request",
                  static_cast<unsigned long long>(call_of(pending.sequence)));
    if (Status status = fits(*request); !status.ok()) return status;
    entering.execution = &own_execution_;
    return own_execution_.start(std::move(*request), pending.sequence, *this);
  }
  auto& runs = pending.call->runs_;
  auto* const run =
      std::find_if(runs.begin(), runs.end(), [](const Call::Run& one) { return !one.busy; });
  PYCOLL_ASSERT(run != runs.end(), "%zu runs of a call at once", runs.size() + 1);
  Status status = bind(*pending.call, *run, pending.input, pending.output);
  if (!status.ok()) return status;
  run->execution.begin(pending.sequence, pending.input, pending.output);
  run->busy = true;
  entering.execution = &run->execution;
  entering.busy = &run->busy;
  return Status();
}

Status Collectives::bind(Call& call, Call::Run& run, const std::byte* input, std::byte* output) {
  if (run.bound) return Status();
  if (Status status = fits(call.request()); !status.ok()) return status;
  CollectiveRequest bound = call.request();
  bound.input.data = input;
  bound.output.data = output;
  Status status = run.execution.bind(std::move(bound), *this);
  run.bound = status.ok();
  return status;
}

// A plan of one rank has no channel to wait for.
Status Collectives::run_alone(Call& call, const std::byte* input, std::byte* output) {
  if (!failure_.ok()) return failure_;
  Call::Run& run = call.runs_.front();
  if (Status status = bind(call, run, input, output); !status.ok()) return status;
  sequence_ = numbers_.next();
  run.execution.begin(sequence_, input, output);
  descriptor_ = call.request().descriptor;
  Progress progress = Progress::kMoved;
  while (progress == Progress::kMoved) progress = run.execution.advance();
  PYCOLL_ASSERT(progress == Progress::kDone, "a plan of one rank waits for a peer");
  return Status();
}

void Collectives::begin_next() {
  while (!refused_ && !queue_.empty() && may_begin(queue_.front().pending)) {
    Queued next = queue_.pop();
    begin(std::move(next.pending), next.request.get());
  }
  note_vacancy();
}

// A disagreement that a later collective finds may be only apparent, or a consequence of an earlier
// one. It is judged when that collective is the oldest.
Collectives::Step Collectives::step(bool all) {
  if (held_) return {};
  bool moved = false;
  for (std::size_t index = 0; index < running_.size(); ++index) {
    Running& one = running_[index];
    if (one.over) continue;
    const bool waits = index != 0 || running_.size() < Call::kRunsMax;
    if (!all && waits && one.asked && !moved) continue;
    one.asked = true;
    const Progress progress = one.execution->advance();
    one.over = progress == Progress::kDone;
    moved |= one.over || progress == Progress::kMoved;
    if (index != 0) continue;
    if (progress == Progress::kDisagree) return {true, Event::kDisagree};
    if (progress == Progress::kSpoiled) return {true, Event::kSpoiled};
  }
  return end_oldest(moved);
}

// Ends the collectives whose rows have all run, oldest first, up to one that a peer has given up. A
// peer may report the failure of a collective after it has sent all its segments. The operation is
// finished last, because its owner may then free everything.
Collectives::Step Collectives::end_oldest(bool moved) {
  bool any = false;
  while (!running_.empty() && running_.front().over) {
    if (peers_.have_given_up(sequence_)) return {moved || any, Event::kGivenUp};
    const Running ended = running_.pop();
    if (ended.busy != nullptr) *ended.busy = false;
    completed_ = ended.pending.sequence;
    if (!running_.empty()) select_oldest();
    ended.pending.operation->finish(Status());
    any = true;
  }
  if (any) begin_next();
  return {moved || any, refused_ ? Event::kRefused : Event::kNone};
}

bool Collectives::may_drop_oldest() const {
  const Running& oldest = running_.front();
  const CollectiveRequest& request = oldest.execution->request();
  const bool bound = oldest.pending.call != nullptr;
  const std::byte* input = bound ? oldest.pending.input : request.input.data;
  const std::byte* output = bound ? oldest.pending.output : request.output.data;
  bool may_drop = oldest.execution->can_drop(input, output);
  // The order of segments in later operations depends on the traversal count, in which this
  // operation is included.
  for (std::size_t index = 1; index < running_.size() && oldest.execution->traversals(); ++index) {
    may_drop &= !running_[index].execution->traversals();
  }
  return may_drop;
}

void Collectives::drop_oldest(const Status& status) {
  running_.front().execution->drop();
  const Running ended = running_.pop();
  if (ended.busy != nullptr) *ended.busy = false;
  if (!running_.empty()) select_oldest();
  ended.pending.operation->finish(status);
  begin_next();
}

void Collectives::hold(std::uint64_t sequence) {
  held_ = true;
  for (std::size_t index = 1; index < running_.size(); ++index) {
    if (running_[index].pending.sequence != sequence) continue;
    descriptor_ = running_[index].execution->request().descriptor;
    sequence_ = sequence;
  }
}

void Collectives::end(const Status& status, const Status& failure) {
  failure_ = failure;
  while (!running_.empty()) {
    const Running ended = running_.pop();
    ended.execution->forget_memory();
    ended.pending.operation->finish(status);
  }
  while (!queue_.empty()) queue_.pop().pending.operation->finish(status);
  note_vacancy();
}

// A long call may run behind a short one, so this looks at all of them.
bool Collectives::are_short() const {
  for (std::size_t index = 0; index < running_.size(); ++index) {
    const Pending& pending = running_[index].pending;
    if (pending.call == nullptr || !pending.call->is_short()) return false;
  }
  return true;
}

const executor::CallArrays* Collectives::arrays_of(std::uint64_t sequence) const {
  for (std::size_t index = 0; index < running_.size(); ++index) {
    const Running& one = running_[index];
    if (one.pending.sequence != sequence) continue;
    const executor::CallArrays* arrays = one.pending.operation->arrays();
    return arrays != nullptr ? arrays : one.execution->request().arrays.get();
  }
  return nullptr;
}

}  // namespace pycoll::engine
