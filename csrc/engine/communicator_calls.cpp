// Short operations that run many times: entry points that never wait for another thread, and the
// same ones with waiting.
#include <utility>

#include "engine/communicator.h"

namespace pycoll::engine {

// Takes the lock if it is free and no other thread waits or sleeps, so that
// no thread needs a signal.
bool Communicator::enter_alone(std::unique_lock<Gate>& lock) {
  return !is_foreign() && lock.try_lock() && waiters_ == nullptr && !sleeping_ && !stopping_;
}

bool Communicator::enter_briefly(std::unique_lock<Gate>& lock, bool leave) {
  return enter_alone(lock) && engine_->is_brief() && (!leave || start_progress_thread().ok());
}

// The progress thread sees the operation through unless a thread comes back for it.
void Communicator::leave_started(const Operation& operation) {
  visited_ = true;
  if (resting_ && !operation.done()) changed_.notify_all();
}

void Communicator::spin(const Operation& operation, Nanoseconds patience) {
  if (patience == 0) {
    // One pass: later calls can handle arrived segments as well, but a new operation must send now.
    do {
      (void)engine_->step_started();
    } while (engine_->runs_short() && engine_->has_newcomer());
    return;
  }
  constexpr int kLooksPerTime = 8;
  WaitStrategy strategy = wait_strategy_of(false);
  Nanoseconds begin = 0;
  for (int looks = 1; !operation.done() && engine_->is_brief() && !gate_.is_wanted(); ++looks) {
    if (look(strategy) != Look::kBusy) break;
    if (looks % kLooksPerTime != 0) continue;
    const Nanoseconds now = clock_->now();
    if (begin == 0) begin = now;
    if (now - begin >= patience) break;
  }
  if (operation.done() && !operation.status().ok()) send_reason();
}

bool Communicator::try_start(const std::shared_ptr<Call>& call, const std::byte* input,
                             std::byte* output, const std::shared_ptr<Operation>& operation,
                             Nanoseconds timeout, Nanoseconds patience, bool leave) {
  std::unique_lock<Gate> lock(gate_, std::defer_lock);
  if (!enter_briefly(lock, leave)) return false;
  engine_->start(call, input, output, operation, timeout);
  spin(*operation, patience);
  if (leave) leave_started(*operation);
  return true;
}

bool Communicator::try_start(const MessageRequest& request,
                             const std::shared_ptr<Operation>& operation, Nanoseconds timeout,
                             Nanoseconds patience, bool leave) {
  std::unique_lock<Gate> lock(gate_, std::defer_lock);
  if (!enter_briefly(lock, leave)) return false;
  engine_->start(request, operation, timeout);
  if (patience != 0) {
    spin(*operation, patience);
  } else if (!operation->done()) {
    // Long segments leave some media only with a poll, and the progress thread may nap now.
    if (leave && request.kind == MessageRequest::Kind::kSend) (void)engine_->move_bytes(false);
    (void)engine_->step_messages();
  }
  if (leave) leave_started(*operation);
  return true;
}

// No thread waits for this call, so none needs a signal.
bool Communicator::try_alone(Call& call, const std::byte* input, std::byte* output,
                             Status* status) {
  if (is_foreign() || !gate_.try_lock()) return false;
  const std::lock_guard<Gate> lock(gate_, std::adopt_lock);
  if (!engine_->idle() || stopping_) return false;
  *status = engine_->run_alone(call, input, output);
  return true;
}

void Communicator::try_drive(const Operation& operation, Nanoseconds patience) {
  std::unique_lock<Gate> lock(gate_, std::defer_lock);
  if (!enter_alone(lock)) return;
  spin(operation, patience);
  visited_ = true;
}

void Communicator::start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
                         const std::shared_ptr<Operation>& operation, Nanoseconds timeout) {
  Status status = foreign();
  if (!status.ok()) return operation->finish(std::move(status));
  const std::lock_guard<Gate> lock(gate_);
  status = start_progress_thread();
  if (!status.ok()) {
    engine_->refuse(status.message());
    return operation->finish(std::move(status));
  }
  engine_->start(std::move(call), input, output, operation, timeout);
  if (!operation->done()) call_driver();
}

Status Communicator::run(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
                         const std::shared_ptr<Operation>& operation, Nanoseconds timeout,
                         const Interrupted& interrupted) {
  if (Status status = foreign(); !status.ok()) return status;
  std::unique_lock<Gate> lock(gate_);
  engine_->start(std::move(call), input, output, operation, timeout);
  return drive_locked(lock, *operation, kForever, interrupted);
}

}  // namespace pycoll::engine
