// The progress thread drives asynchronous operations while their owners do other work.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <system_error>

#include "engine/communicator.h"

namespace pycoll::engine {
namespace {

// A thread that starts short operations in sequence drives them itself; waking the progress thread
// for each would cost more than the operations. The progress thread checks them when no thread has
// come for the time of a nap. The nap doubles each time that a thread came, so that the checks do
// not slow it down.
constexpr std::chrono::microseconds kNapMin{200}, kNapMax{1600};

// Blocks all signals in threads that are created during its lifetime; signals
// belong to the user's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Status Communicator::start_progress_thread() {
  if (progress_thread_.joinable() || stopping_) return Status();
  const SignalsBlocked blocked;
  try {
    progress_thread_ = std::thread([this] { run_progress_thread(); });
  } catch (const std::system_error& error) {
    return Status::error(Code::kTransport, "rank " + std::to_string(rank()) +
                                               " cannot start the progress thread (" +
                                               error.what() +
                                               "): raise the limit of processes (ulimit -u), or "
                                               "use blocking operations");
  }
  return Status();
}

void Communicator::run_progress_thread() {
  std::unique_lock<Gate> lock(gate_);
  WaitStrategy strategy = wait_strategy_of(true);
  auto nap = kNapMin;
  while (!stopping_) {
    if (gate_.is_wanted()) {
      gate_.give_way();
    } else if (visited_) {
      visited_ = false;
      napping_ = true;
      changed_.wait_for(lock, nap);
      napping_ = false;
      nap = visited_ ? std::min(2 * nap, kNapMax) : kNapMin;
      strategy.reset();
    } else if (driver() != nullptr || !(engine_->active() || engine_->owes_reason())) {
      resting_ = true;
      changed_.wait(lock);
      resting_ = false;
      strategy.reset();
    } else if (look(strategy) == Look::kQuiet) {
      rest(lock, strategy);
    }
  }
}

}  // namespace pycoll::engine
