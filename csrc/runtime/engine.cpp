#include "runtime/engine.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace pycoll::runtime {

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
  links_.assign(size, nullptr);
  media_.assign(size, "self");
  mailboxes_.resize(size);
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

std::string_view Engine::transport_of(int peer) const {
  return media_[static_cast<std::size_t>(peer)];
}

bool Engine::active() const {
  return running_ || std::any_of(mailboxes_.begin(), mailboxes_.end(), [](const auto& mailbox) {
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

std::shared_ptr<Operation> Engine::start(CollectiveRequest request, Nanoseconds timeout) {
  auto operation = std::make_shared<Operation>();
  if (!failure_.ok()) {
    operation->finish(failure_);
  } else if (Status status = fits(request); !status.ok()) {
    operation->finish(std::move(status));
  } else if (running_) {
    queue_.push_back({{nullptr, nullptr, nullptr, operation, timeout, 0}, std::move(request)});
  } else {
    begin({nullptr, nullptr, nullptr, operation, timeout, 0}, &request);
  }
  return operation;
}

void Engine::start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
                   std::shared_ptr<Operation> operation, Nanoseconds timeout) {
  if (!failure_.ok()) {
    operation->finish(failure_);
    return;
  }
  Pending pending{std::move(call), input, output, std::move(operation), timeout, 0};
  if (running_) {
    queue_.push_back({std::move(pending), {}});
  } else {
    begin(std::move(pending), nullptr);
  }
}

// Makes it what runs; a wrong request ends at once and uses up no sequence number.
bool Engine::begin(Pending pending, CollectiveRequest* request) {
  Status status = enter(pending, request);
  if (!status.ok()) {
    pending.operation->finish(std::move(status));
    return false;
  }
  ++sequence_;
  descriptor_ = execution_->request().descriptor;
  current_ = std::move(pending);
  running_ = true;
  announced_ = false;
  began_ = 0;  // the clock is read only if it comes to waiting
  return true;
}

Status Engine::enter(Pending& pending, CollectiveRequest* request) {
  if (pending.call == nullptr) {
    PYCOLL_ASSERT(request != nullptr, "operation %llu is neither a call nor a request",
                  static_cast<unsigned long long>(sequence_ + 1));
    execution_ = &own_execution_;
    return own_execution_.start(std::move(*request), sequence_ + 1, *this);
  }
  Call& call = *pending.call;
  execution_ = &call.execution_;
  if (!call.bound_) {
    if (Status status = fits(call.request()); !status.ok()) return status;
    CollectiveRequest bound = call.request();
    bound.input.data = pending.input;
    bound.output.data = pending.output;
    if (Status status = call.execution_.bind(std::move(bound), *this); !status.ok()) return status;
    call.bound_ = true;
  }
  call.execution_.begin(sequence_ + 1, pending.input, pending.output);
  return Status();
}

void Engine::begin_next() {
  while (!queue_.empty()) {
    Queued next = std::move(queue_.front());
    queue_.pop_front();
    if (begin(std::move(next.pending), &next.request)) return;
  }
}

// The operation is told last: it may belong to a caller who lets go of everything then.
void Engine::finish_current(Status status) {
  running_ = false;
  const Pending ended = std::move(current_);
  ended.operation->finish(std::move(status));
  begin_next();
}

std::shared_ptr<Operation> Engine::start(const MessageRequest& request, Nanoseconds timeout) {
  auto operation = std::make_shared<Operation>();
  if (!failure_.ok()) {
    operation->finish(failure_);
    return operation;
  }
  if (request.peer < 0 || request.peer >= size()) {
    operation->finish(Status::error(
        Code::kInvalidArgument, "rank " + std::to_string(rank()) + ": peer is " +
                                    std::to_string(request.peer) + ": expected a rank from 0 to " +
                                    std::to_string(size() - 1)));
    return operation;
  }
  auto& mailbox = mailboxes_[static_cast<std::size_t>(request.peer)];
  if (mailbox == nullptr) mailbox = std::make_unique<Mailbox>(request.peer);
  const bool receiving = request.kind == MessageRequest::Kind::kRecv;
  if (receiving) {
    mailbox->post_recv(request, operation);
  } else if (request.peer == rank()) {
    mailbox->send_to_self(request, *operation);
    drop_ended_messages();
  } else {
    mailbox->post_send(request, operation);
  }
  if (!operation->done()) {
    message_deadlines_.push_back(
        {operation, request.peer, receiving, timeout, later(options_.clock->now(), timeout)});
  }
  return operation;
}

bool Engine::step() {
  Progress progress = Progress::kBlocked;
  if (running_ && disputed_ == 0) {
    progress = execution_->advance();
    if (progress == Progress::kDone) {
      finish_current(Status());
    } else if (progress == Progress::kDisagree) {
      disagree(sequence_);
    } else if (progress == Progress::kSpoiled) {
      give_up(
          Status::error(Code::kInterrupted, "the reduction raised an error in " + current_text()),
          rank(), "its reduction raised an error");
      return true;
    }
  }
  return step_messages() || progress != Progress::kBlocked;
}

// A rank that waits for a send takes in what others send to it: two ranks that send to each other,
// or a ring of them, must not wait for ever.
bool Engine::step_messages() {
  if (message_deadlines_.empty()) return false;
  bool moved = false;
  const bool any_sending =
      std::any_of(mailboxes_.begin(), mailboxes_.end(),
                  [](const auto& mailbox) { return mailbox != nullptr && mailbox->sending(); });
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    auto& mailbox = mailboxes_[static_cast<std::size_t>(peer)];
    if (mailbox == nullptr) mailbox = std::make_unique<Mailbox>(peer);
    if (!any_sending && !mailbox->receiving()) continue;
    if (mailbox->sending()) {
      moved |= mailbox->advance_sends(send_channel(peer, transport::kMessageChannel));
    }
    moved |= mailbox->advance_recvs(recv_channel(peer, transport::kMessageChannel));
    if (mailbox->broken()) {
      const std::string how = "it sent a malformed message";
      give_up(peer_lost_verdict(peer, how, current_text(), options_.names), peer, how);
      return true;
    }
  }
  if (moved) drop_ended_messages();
  return moved;
}

void Engine::drop_ended_messages() {
  std::erase_if(message_deadlines_, [](const Deadline& deadline) {
    const auto operation = deadline.operation.lock();
    return operation == nullptr || operation->done();
  });
}

void Engine::end_all(const Status& status) {
  for (const auto& medium : options_.transports) medium->let_go();
  if (running_) current_.operation->finish(status);
  running_ = false;
  current_ = {};
  disputed_ = 0;
  for (Queued& queued : queue_) queued.pending.operation->finish(status);
  queue_.clear();
  for (auto& mailbox : mailboxes_) {
    if (mailbox != nullptr) mailbox->fail(status);
  }
  message_deadlines_.clear();
}

bool Engine::poll() {
  if (closed_) return false;
  bool moved = false;
  for (const auto& medium : options_.transports) moved |= medium->poll();
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

}  // namespace pycoll::runtime
