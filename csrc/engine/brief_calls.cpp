#include "engine/brief_calls.h"

namespace pycoll::engine {

bool BriefCalls::enter(std::unique_lock<Gate>& lock, bool leave) const {
  return driver_.enter_alone(lock) && driver_.engine().operations().are_short() &&
         (!leave || driver_.start_progress_thread().ok());
}

bool BriefCalls::try_start(const std::shared_ptr<Call>& call, const std::byte* input,
                           std::byte* output, const std::shared_ptr<Operation>& operation,
                           Nanoseconds timeout, Nanoseconds patience, bool leave) const {
  std::unique_lock<Gate> lock(driver_.gate(), std::defer_lock);
  if (!enter(lock, leave)) return false;
  driver_.engine().start(call, input, output, operation, timeout);
  driver_.spin(*operation, patience);
  if (leave) driver_.leave(!operation->done());
  return true;
}

bool BriefCalls::try_start(const MessageRequest& request,
                           const std::shared_ptr<Operation>& operation, Nanoseconds timeout,
                           Nanoseconds patience, bool leave) const {
  std::unique_lock<Gate> lock(driver_.gate(), std::defer_lock);
  if (!enter(lock, leave)) return false;
  Engine& engine = driver_.engine();
  (void)engine.start(request, timeout, operation);
  if (patience != 0) {
    driver_.spin(*operation, patience);
  } else if (!operation->done()) {
    // Long segments leave some media only with a poll, and the progress thread may nap now.
    const bool sends = request.kind == MessageRequest::Kind::kSend;
    if (leave && sends) (void)engine.operations().peers.poll(false);
    (void)engine.step(Engine::Part::kMessages);
  }
  if (leave) driver_.leave(!operation->done());
  return true;
}

void BriefCalls::try_drive(const Operation& operation, Nanoseconds patience) const {
  std::unique_lock<Gate> lock(driver_.gate(), std::defer_lock);
  if (!driver_.enter_alone(lock)) return;
  driver_.spin(operation, patience);
  driver_.leave(false);
}

// No thread waits for this call, so none needs a signal.
bool BriefCalls::try_alone(Call& call, const std::byte* input, std::byte* output,
                           Status* status) const {
  if (driver_.is_foreign() || !driver_.gate().try_lock()) return false;
  const std::lock_guard<Gate> lock(driver_.gate(), std::adopt_lock);
  Collectives& collectives = driver_.engine().operations().collectives;
  if (!collectives.idle() || driver_.is_stopping()) return false;
  *status = collectives.run_alone(call, input, output);
  return true;
}

}  // namespace pycoll::engine
