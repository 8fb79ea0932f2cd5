#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace pycoll::engine {

Status Engine::create(EngineOptions options, std::unique_ptr<Engine>* engine) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return Status::error(Code::kInvalidArgument, "rank is " + std::to_string(options.rank) +
                                                     " of size " + std::to_string(options.size) +
                                                     ": expected a rank from 0 to size - 1");
  }
  std::unique_ptr<Engine> made(new Engine(std::move(options)));
  for (int peer = 0; peer < made->size(); ++peer) {
    if (peer != made->rank() && made->links_[static_cast<std::size_t>(peer)] == nullptr) {
      return Status::error(Code::kInvalidArgument,
                           "rank " + std::to_string(made->rank()) + " has no transport to rank " +
                               std::to_string(peer),
                           {peer});
    }
  }
  *engine = std::move(made);
  return Status();
}

Engine::Engine(EngineOptions options) : options_(std::move(options)) {
  const auto size = static_cast<std::size_t>(options_.size);
  for (const auto& medium : options_.transports) {
    const transport::TransportCapabilities can = medium->capabilities();
    if (!can.shows_without_poll) moved_by_poll_.push_back(medium.get());
    if (can.output != nullptr) outputs_.push_back(can.output);
  }
  links_.assign(size, nullptr);
  media_.assign(size, "self");
  mailboxes_.resize(size);
  tickets_.resize(size);
  for (std::size_t peer = 0; peer < size; ++peer) {
    if (static_cast<int>(peer) == options_.rank) continue;
    for (const auto& medium : options_.transports) {
      links_[peer] = medium->link(static_cast<int>(peer));
      media_[peer] = medium->name();
      if (links_[peer] != nullptr) break;
    }
  }
}

transport::SendChannel& Engine::send_channel(int peer, std::uint32_t number) {
  return links_[static_cast<std::size_t>(peer)]->send_channel(number);
}

transport::RecvChannel& Engine::recv_channel(int peer, std::uint32_t number) {
  return links_[static_cast<std::size_t>(peer)]->recv_channel(number);
}

ChannelTicket& Engine::send_ticket(int peer, std::uint32_t number) {
  return tickets_[static_cast<std::size_t>(peer)].send[number];
}

ChannelTicket& Engine::recv_ticket(int peer, std::uint32_t number) {
  return tickets_[static_cast<std::size_t>(peer)].recv[number];
}

std::string_view Engine::transport_of(int peer) const {
  return media_[static_cast<std::size_t>(peer)];
}

bool Engine::active() const {
  return !running_.empty() || !from_any_.recvs.empty() || !probes_.empty() ||
         std::any_of(mailboxes_.begin(), mailboxes_.end(), [](const auto& mailbox) {
           return mailbox != nullptr && (mailbox->sending() || mailbox->receiving());
         });
}

Status Engine::fits(const CollectiveRequest& request) const {
  const plan::Header& header = request.plan->header();
  if (header.size == static_cast<std::uint32_t>(size()) &&
      header.rank == static_cast<std::uint32_t>(rank())) {
    return Status();
  }
  return Status::error(Code::kInvalidArgument,
                       "the plan is for rank " + std::to_string(header.rank) + " of " +
                           std::to_string(header.size) + ", this is rank " +
                           std::to_string(rank()) + " of " + std::to_string(size()));
}

// Sequence numbers are assigned when operations start: all ranks start them in the same order.
std::uint64_t Engine::next_sequence() {
  const std::uint64_t last = called_.load(std::memory_order_relaxed);
  const std::uint64_t next = parts_ == Parts::kMore ? last + 1 : next_call(last);
  if (parts_ == Parts::kFirst) parts_ = Parts::kMore;
  called_.store(next, std::memory_order_relaxed);
  return next;
}

namespace {

// Whether a long operation may run at the same time as others. With servers it should: a worker's
// link out is idle while it receives the last results, and carries the next operation's values. A
// conversion needs memory of the array's length, which own_execution_ keeps for the next operation.
bool overlaps_others(const CollectiveRequest& request) {
  return request.plan->header().servers != 0 && request.parts.empty() && !request.form;
}

}  // namespace

std::shared_ptr<Operation> Engine::start(CollectiveRequest request, Nanoseconds timeout) {
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
  Pending pending{nullptr, nullptr, nullptr, operation, timeout, next_sequence(), 0};
  if (running_.empty()) {
    begin(std::move(pending), &request);
  } else {
    queue_.push({std::move(pending), std::make_unique<CollectiveRequest>(std::move(request))});
  }
  note_vacancy();
  return operation;
}

void Engine::start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
                   std::shared_ptr<Operation> operation, Nanoseconds timeout) {
  if (!failure_.ok()) {
    operation->finish(failure_);
    return;
  }
  Pending pending{std::move(call), input,           output, std::move(operation),
                  timeout,         next_sequence(), 0};
  if (queue_.empty() && may_begin(pending)) {
    begin(std::move(pending), nullptr);
  } else {
    queue_.push({std::move(pending), nullptr});
  }
  note_vacancy();
}

namespace {

// Whether the ranges [one, one + one_bytes) and [other, other + other_bytes) overlap.
bool overlap(const std::byte* one, std::uint64_t one_bytes, const std::byte* other,
             std::uint64_t other_bytes) {
  return one_bytes != 0 && other_bytes != 0 && one < other + other_bytes && other < one + one_bytes;
}

}  // namespace

// Whether the collective may run concurrently with those that run. Only calls may, and only if
// their memory does not depend on the end of the others.
bool Engine::may_begin(const Pending& pending) const {
  if (running_.empty()) return true;
  if (pending.call == nullptr || !runs_call() || running_.size() == Call::kRunsMax || disputes() ||
      inquires()) {
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
void Engine::begin(Pending&& pending, CollectiveRequest* request) {
  Running entering{std::move(pending)};
  if (const Status status = enter(entering, request); !status.ok()) {
    const std::uint64_t sequence = entering.pending.sequence;
    entering.pending.operation->finish(
        Status::error(status.code(), status.message(), {rank()}, status.how()));
    tell_refused({sequence, sequence}, status.message());
    return;
  }
  running_.push(std::move(entering));
  if (running_.size() == 1) select_oldest();
}

// Makes the oldest running collective the one that notices and deadlines concern.
void Engine::select_oldest() {
  sequence_ = running_.front().pending.sequence;
  descriptor_ = running_.front().execution->request().descriptor;
  announced_ = false;
  began_ = 0;  // the clock is read only when this rank has to wait
}

Status Engine::enter(Running& entering, CollectiveRequest* request) {
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

Status Engine::bind(Call& call, Call::Run& run, const std::byte* input, std::byte* output) {
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
Status Engine::run_alone(Call& call, const std::byte* input, std::byte* output) {
  if (!failure_.ok()) return failure_;
  Call::Run& run = call.runs_.front();
  if (Status status = bind(call, run, input, output); !status.ok()) return status;
  sequence_ = next_sequence();
  run.execution.begin(sequence_, input, output);
  descriptor_ = call.request().descriptor;
  Progress progress = Progress::kMoved;
  while (progress == Progress::kMoved) progress = run.execution.advance();
  PYCOLL_ASSERT(progress == Progress::kDone, "a plan of one rank waits for a peer");
  return Status();
}

void Engine::begin_next() {
  while (!queue_.empty() && may_begin(queue_.front().pending)) {
    Queued next = queue_.pop();
    begin(std::move(next.pending), next.request.get());
  }
  note_vacancy();
}

// Ends every collective whose rows have run, in order, unless a peer has given it up: all its
// segments may have come from ranks that have since reported its failure. The operation is finished
// last, because its owner may then free everything.
bool Engine::end_oldest() {
  bool any = false;
  while (!running_.empty() && running_.front().over) {
    if (is_given_up(sequence_)) return look_at_notices() || any;
    const Running ended = running_.pop();
    if (ended.busy != nullptr) *ended.busy = false;
    completed_ = ended.pending.sequence;
    if (!running_.empty()) select_oldest();
    ended.pending.operation->finish(Status());
    any = true;
  }
  if (any) begin_next();
  return any;
}

std::shared_ptr<Operation> Engine::start(const MessageRequest& request, Nanoseconds timeout) {
  auto operation = std::make_shared<Operation>();
  start(request, operation, timeout);
  return operation;
}

void Engine::start(const MessageRequest& request, std::shared_ptr<Operation> operation,
                   Nanoseconds timeout) {
  if (!failure_.ok()) return operation->finish(failure_);
  const bool receiving = request.kind == MessageRequest::Kind::kRecv;
  const bool from_any = receiving && request.peer == kAnyPeer;
  if (!from_any && (request.peer < 0 || request.peer >= size())) {
    operation->finish(Status::error(
        Code::kInvalidArgument, "rank " + std::to_string(rank()) + ": peer is " +
                                    std::to_string(request.peer) + ": expected a rank from 0 to " +
                                    std::to_string(size() - 1)));
    return;
  }
  if (from_any) {
    receive_from_any(request, operation);
  } else if (receiving) {
    mailbox_of(request.peer).post_recv(request, operation);
  } else if (request.peer == rank()) {
    mailbox_of(request.peer).send_to_self(request, *operation);
    drop_ended_messages();
    answer_probes();
  } else {
    send_at_once(request, operation);
  }
  if (operation->done()) return;
  using Kind = LateMessage::Kind;
  const Kind kind = from_any ? Kind::kRecvFromAny : receiving ? Kind::kRecv : Kind::kSend;
  const bool is_long = request.data.bytes > Call::kShortBytes;
  message_deadlines_.push_back({std::move(operation), kind, request.peer, request.tag, timeout,
                                later(options_.clock->now(), timeout), is_long});
  long_messages_ += is_long ? 1 : 0;
}

// A short message has usually left when this returns, so that it needs no deadline.
void Engine::send_at_once(const MessageRequest& request,
                          const std::shared_ptr<Operation>& operation) {
  Mailbox& mailbox = mailbox_of(request.peer);
  const bool queued = mailbox.sending();
  mailbox.post_send(request, operation);
  if (queued || inquires() || request.data.bytes > Call::kShortBytes) return;
  (void)mailbox.advance_sends(send_channel(request.peer, transport::kMessageChannel));
}

std::shared_ptr<Operation> Engine::start(const ProbeRequest& request) {
  auto operation = std::make_shared<Operation>();
  if (!failure_.ok()) {
    operation->finish(failure_);
    return operation;
  }
  probes_.push_back({request, operation});
  answer_probes();
  return operation;
}

void Engine::forget_probe(const Operation& operation) {
  std::erase_if(probes_, [&operation](const OpenProbe& probe) {
    return probe.operation.get() == &operation;
  });
}

void Engine::answer_probes() {
  std::erase_if(probes_, [this](const OpenProbe& probe) {
    for (const auto& mailbox : mailboxes_) {
      const int peer = probe.request.peer;
      if (mailbox == nullptr || (peer != kAnyPeer && peer != mailbox->peer())) continue;
      const std::optional<Probed> found = mailbox->probe(probe.request.tag);
      if (!found) continue;
      *probe.request.found = *found;
      probe.operation->finish(Status());
      return true;
    }
    return false;
  });
}

Mailbox& Engine::mailbox_of(int peer) {
  auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
  if (mailbox == nullptr) mailbox = std::make_unique<Mailbox>(peer, &from_any_);
  return *mailbox;
}

// A message that is already here is matched at once; otherwise the first mailbox that gets a
// matching message finds the receive in the list.
void Engine::receive_from_any(const MessageRequest& request, std::shared_ptr<Operation> operation) {
  const auto found =
      std::find_if(mailboxes_.begin(), mailboxes_.end(), [&request](const auto& mailbox) {
        return mailbox != nullptr && mailbox->holds(request.tag);
      });
  if (found != mailboxes_.end()) {
    (*found)->post_recv(request, std::move(operation));
  } else {
    from_any_.recvs.push_back({request, std::move(operation), from_any_.posted++});
  }
}

// Calls that may run along may be long, behind a short one too.
bool Engine::is_brief() const {
  for (std::size_t index = 0; index < running_.size(); ++index) {
    const Pending& pending = running_[index].pending;
    if (pending.call == nullptr || !pending.call->is_short()) return false;
  }
  return long_messages_ == 0 && !long_arrives_;
}

bool Engine::step() {
  const bool moved = step_collectives(true);
  if (!failure_.ok()) return moved;
  return step_messages() || moved;
}

bool Engine::step_started() { return step_collectives(false); }

// A disagreement that a later collective finds may be only apparent, or a consequence of an earlier
// one. It is judged when that collective is the oldest.
bool Engine::step_collectives(bool all) {
  if (disputes() || inquires()) return false;
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
    if (progress == Progress::kDisagree) {
      disagree(sequence_);
      return true;
    }
    if (progress == Progress::kSpoiled) {
      give_up(Status::error(Code::kInterrupted,
                            "the reduction raised an error in " + current_text(rank())),
              rank(), "its reduction raised an error");
      return true;
    }
  }
  return end_oldest() || moved;
}

// A rank that waits for a send also receives: two ranks that send to each other, or a ring of
// ranks, must not deadlock. Otherwise messages without a receive stay in the channel, from which
// they go to the memory of the receive without a copy.
bool Engine::step_messages() {
  long_arrives_ = false;
  if ((message_deadlines_.empty() && probes_.empty()) || inquires()) return false;
  bool moved = false;
  const bool any_sending =
      std::any_of(mailboxes_.begin(), mailboxes_.end(),
                  [](const auto& mailbox) { return mailbox != nullptr && mailbox->sending(); });
  const bool takes_unclaimed = any_sending || !from_any_.recvs.empty() || !probes_.empty();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    Mailbox& mailbox = mailbox_of(peer);
    if (!takes_unclaimed && !mailbox.receiving()) continue;
    if (mailbox.sending()) {
      moved |= mailbox.advance_sends(send_channel(peer, transport::kMessageChannel));
    }
    moved |= mailbox.advance_recvs(recv_channel(peer, transport::kMessageChannel), takes_unclaimed);
    long_arrives_ |= mailbox.arriving() > Call::kShortBytes;
    if (mailbox.is_broken()) {
      const std::string how = "it sent a malformed message";
      give_up(peer_lost_verdict(peer, how, current_text(peer), options_.names), peer, how);
      return true;
    }
  }
  if (!moved) return false;
  drop_ended_messages();
  answer_probes();
  return true;
}

void Engine::drop_ended_messages() {
  std::erase_if(message_deadlines_, [this](const Deadline& deadline) {
    const bool ended = deadline.operation->done();
    long_messages_ -= ended && deadline.is_long ? 1 : 0;
    return ended;
  });
}

void Engine::end_all(const Status& status) {
  for (const auto& medium : options_.transports) medium->let_go(transport::LetGo::kAll);
  dispute_ = {};
  account_ = {};
  while (!running_.empty()) {
    const Running ended = running_.pop();
    ended.execution->forget_memory();
    ended.pending.operation->finish(status);
  }
  while (!queue_.empty()) queue_.pop().pending.operation->finish(status);
  for (auto& mailbox : mailboxes_) {
    if (mailbox != nullptr) mailbox->fail(status);
  }
  for (const OpenRecv& recv : from_any_.recvs) recv.operation->finish(status);
  from_any_.recvs.clear();
  for (const OpenProbe& probe : probes_) probe.operation->finish(status);
  probes_.clear();
  message_deadlines_.clear();
  long_messages_ = 0;
  note_vacancy();
}

bool Engine::poll() { return move_bytes(true); }

bool Engine::move_bytes(bool all) {
  if (closed_) return false;
  bool moved = false;
  if (all) {
    for (const auto& medium : options_.transports) moved |= medium->poll();
  } else {
    for (transport::Transport* medium : moved_by_poll_) moved |= medium->poll();
  }
  return moved;
}

void Engine::close() {
  if (closed_) return;
  closed_ = true;
  const Status closed = Status::error(Code::kClosed, "the communicator was closed");
  if (failure_.ok()) failure_ = closed;
  end_all(failure_);
  for (const auto& medium : options_.transports) medium->close();
}

}  // namespace pycoll::engine
