// The thread that moves asynchronous operations along while their owners are elsewhere.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <system_error>

#include "runtime/communicator.h"

namespace pycoll::runtime {
namespace {

// Who starts short operations one after the other drives them on the way; waking the progress
// thread for each would cost more than all of it. It looks after them when nobody came for so long,
// and twice as long each time that somebody did: to look every 200 us took a quarter of the time of
// who came again and again.
constexpr std::chrono::microseconds kNapMin{200}, kNapMax{1600};

// Signals are for the threads of the user: blocked in the threads that are made while this lives.
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
  Pace pace = pace_of(true);
  auto nap = kNapMin;
  while (!stopping_) {
    if (gate_.wanted()) {
      gate_.give_way();
    } else if (visited_) {
      visited_ = false;
      napping_ = true;
      changed_.wait_for(lock, nap);
      napping_ = false;
      nap = visited_ ? std::min(2 * nap, kNapMax) : kNapMin;
      pace.reset();
    } else if (driver() != nullptr || !(engine_->active() || engine_->owes_reason())) {
      resting_ = true;
      changed_.wait(lock);
      resting_ = false;
      pace.reset();
    } else if (look(pace) == Look::kQuiet) {
      rest(lock, pace);
    }
  }
}

}  // namespace pycoll::runtime
