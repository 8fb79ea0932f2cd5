#include "engine/communicator.h"

#include <algorithm>
#include <atomic>

namespace pycoll::engine {

void Communicator::Retire::operator()(Communicator* communicator) const {
  if (communicator->driver_->foreign().ok()) {
    communicator->close();
    delete communicator;
    return;
  }
  // Even destroying the condition variable would wait for threads that do not exist in the child.
  static std::atomic<Communicator*> forgotten{nullptr};
  communicator->next_forgotten_ = forgotten.exchange(communicator);
}

Status Communicator::create(EngineOptions options, Handle* communicator) {
  std::unique_ptr<EngineDriver> driver;
  Status status = EngineDriver::create(std::move(options), &driver);
  if (status.ok()) communicator->reset(new Communicator(std::move(driver)));
  return status;
}

Status Communicator::drive(const Operation& operation, Nanoseconds patience,
                           const Interrupted& interrupted) {
  if (operation.done()) return operation.status();
  if (Status status = driver_->foreign(); !status.ok()) return status;
  std::unique_lock<Gate> lock(driver_->gate());
  return driver_->drive(lock, operation, patience, interrupted);
}

bool Communicator::probe(const ProbeRequest& request, Nanoseconds patience,
                         const Interrupted& interrupted, Status* status) {
  if (*status = driver_->foreign(); !status->ok()) return false;
  std::unique_lock<Gate> lock(driver_->gate());
  return probe(lock, request, patience, interrupted, status);
}

bool Communicator::probe(std::unique_lock<Gate>& lock, const ProbeRequest& request,
                         Nanoseconds patience, const Interrupted& interrupted, Status* status) {
  OpenMessages& messages = driver_->engine().operations().messages;
  const auto operation = messages.start(request);
  *status = driver_->drive(lock, *operation, patience, interrupted);
  if (operation->done()) return status->ok();
  messages.forget(*operation);
  *status = Status();
  return false;
}

bool Communicator::recv_within(const ProbeRequest& request, executor::Memory memory,
                               Nanoseconds patience, Nanoseconds timeout,
                               const Interrupted& interrupted, Status* status) {
  if (*status = driver_->foreign(); !status->ok()) return false;
  std::unique_lock<Gate> lock(driver_->gate());
  OpenMessages& messages = driver_->engine().operations().messages;
  Clock& clock = operations().peers.clock();
  const Nanoseconds begin = clock.now();
  const auto left = [&] {
    return patience == kForever ? kForever
                                : std::max<Nanoseconds>(0, patience - (clock.now() - begin));
  };
  // Another thread may receive the message before this one has the lock again. A probe that is
  // answered at once finds one that is still here.
  std::shared_ptr<Operation> found;
  do {
    if (!probe(lock, request, left(), interrupted, status)) return false;
    found = messages.start(request);
    if (!found->done()) messages.forget(*found);
  } while (!found->done());
  if (*status = found->status(); !status->ok()) return false;
  const executor::Probed& message = *request.found;
  if (message.bytes > memory.bytes) return true;
  const auto operation = enter(executor::MessageRequest{executor::MessageRequest::Kind::kRecv,
                                                        message.source,
                                                        message.tag,
                                                        {memory.data, message.bytes}},
                               timeout);
  *status = driver_->drive(lock, *operation, kForever, interrupted);
  return status->ok();
}

void Communicator::refuse(const std::string& why) {
  if (driver_->is_foreign()) return;
  const std::lock_guard<Gate> lock(driver_->gate());
  driver_->engine().refuse(why);
  driver_->tell_ended();
}

void Communicator::begin_call() {
  if (driver_->is_foreign()) return;
  const std::lock_guard<Gate> lock(driver_->gate());
  driver_->engine().operations().numbers.begin_call();
}

void Communicator::end_call() {
  if (driver_->is_foreign()) return;
  const std::lock_guard<Gate> lock(driver_->gate());
  driver_->engine().operations().numbers.end_call();
}

Status Communicator::failure() const {
  if (Status status = driver_->foreign(); !status.ok()) return status;
  const std::lock_guard<Gate> lock(driver_->gate());
  return driver_->engine().failure();
}

Status Communicator::abort(const std::string& why) {
  if (Status status = driver_->foreign(); !status.ok()) return status;
  const std::lock_guard<Gate> lock(driver_->gate());
  driver_->engine().interrupt(why);
  driver_->tell_ended();
  return Status();
}

void Communicator::close() { driver_->close(); }

}  // namespace pycoll::engine
