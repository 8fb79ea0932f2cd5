#include "engine/engine_driver.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <ctime>
#include <system_error>

#include "base/cores.h"

namespace pycoll::engine {
namespace {

thread_local bool in_background = false;

// The longest sleep without a check of deadlines and peers. Signals are checked at the same
// interval, so at most twice this time lies between two checks.
constexpr int kSleepMilliseconds = 20;
constexpr std::chrono::milliseconds kSleep{kSleepMilliseconds};
constexpr Nanoseconds kSignalCheckEvery = 20'000'000;

// A sleep, however short, lets the scheduler choose another core.
void leave_core() {
  const timespec shortly = {0, 1};
  ::nanosleep(&shortly, nullptr);
}

std::vector<transport::CoreHints*> core_hints_of(const Engine& engine) {
  std::vector<transport::CoreHints*> found;
  for (const auto& medium : engine.operations().peers.transports()) {
    const transport::TransportCapabilities can = medium->capabilities();
    if (can.core_hints != nullptr) found.push_back(can.core_hints);
  }
  return found;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

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

void work_in_background() { in_background = true; }

// A thread inside drive(). Created and destroyed under the lock.
class EngineDriver::Waiter {
 public:
  Waiter(EngineDriver& driver, const Operation& operation)
      : driver_(driver), operation_(operation), next_(driver.waiters_) {
    driver.waiters_ = this;
    // The new thread takes over from a sleeping one, and may have to sleep on the media itself.
    if (driver.sleeping_) driver.wake_sleeper();
  }
  ~Waiter() {
    Waiter** place = &driver_.waiters_;
    while (*place != this) place = &(*place)->next_;
    *place = next_;
    driver_.pass_on();
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  Waiter* next() const { return next_; }
  bool away() const { return away_; }
  void set_away(bool away) { away_ = away; }
  // True once, after the operation has ended.
  bool ended_untold() {
    if (told_ || !operation_.done()) return false;
    return told_ = true;
  }

 private:
  EngineDriver& driver_;
  const Operation& operation_;
  Waiter* next_;
  bool away_ = false;  // asks for interrupts without the lock; other threads drive
  bool told_ = false;
};

Status EngineDriver::create(EngineOptions options, std::unique_ptr<EngineDriver>* driver) {
  const int cores = options.cores > 0 ? options.cores : usable_cores();
  const bool cpu_balancing = options.cpu_balancing;
  std::unique_ptr<Engine> engine;
  Status status = Engine::create(std::move(options), &engine);
  if (!status.ok()) return status;
  std::unique_ptr<EngineDriver> made(new EngineDriver(std::move(engine), cores));
  made->balances_ = made->oversubscribed_ && cpu_balancing;
  if (made->oversubscribed_) made->cpu_balancer_.share_cores();
  if (!made->wake_.valid()) {
    return Status::error(Code::kTransport, "rank " + std::to_string(made->engine_->rank()) +
                                               " cannot make an eventfd: out of file descriptors? "
                                               "Raise the limit of open files (ulimit -n)");
  }
  *driver = std::move(made);
  return Status();
}

EngineDriver::EngineDriver(std::unique_ptr<Engine> engine, int cores)
    : engine_(std::move(engine)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      cpu_balancer_(engine_->rank(), engine_->size(), cores, core_hints_of(*engine_)),
      birth_(current_generation()) {
  const auto& media = engine_->operations().peers.media();
  neighbours_ = 1 + static_cast<int>(std::count(media.begin(), media.end(), "shm"));
  oversubscribed_ = neighbours_ > cores;
}

// Within a host, messages need the cores themselves, so leaving the core to others gains nothing.
WaitStrategy EngineDriver::wait_strategy_of(bool background) const {
  const bool has_far_peers = neighbours_ < engine_->size();
  return background && has_far_peers ? WaitStrategy::background()
                                     : WaitStrategy(oversubscribed_, waiting_threads_.together(),
                                                    has_far_peers && neighbours_ == 1);
}

long EngineDriver::current_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;
  return fork_generation.load(std::memory_order_relaxed);
}

// Called before any lock is taken: in a child, threads that do not exist there may hold the locks.
Status EngineDriver::foreign() const {
  if (!is_foreign()) return Status();
  return Status::error(Code::kClosed,
                       "this communicator belongs to the parent process; a forked child cannot use "
                       "it: call pycoll.init() in the child, or start it with spawn");
}

Status EngineDriver::drive(std::unique_lock<Gate>& lock, const Operation& operation,
                           Nanoseconds patience, const Interrupted& interrupted) {
  Waiter me(*this, operation);
  WaitStrategy strategy = wait_strategy_of(in_background);
  const Nanoseconds begin = patience == kForever ? 0 : clock().now();
  Nanoseconds asked = 0;
  while (!operation.done()) {
    if (gate_.is_wanted()) gate_.give_way();
    const bool driving = newest() == &me;
    const Look found = driving ? look(strategy) : Look::kQuiet;
    if (found == Look::kBusy) continue;
    if (operation.done()) break;
    if (found == Look::kQuiet && driving && patience == kForever && strategy.is_hurried()) {
      rest(lock, strategy);
      continue;
    }
    const Nanoseconds now = clock().now();
    if (asked == 0) asked = now;
    if (interrupted && now - asked >= kSignalCheckEvery) {
      asked = now;
      ask(lock, me, interrupted);
      continue;
    }
    if (patience != kForever && now - begin >= patience) {
      return Status::error(Code::kTimeout,
                           "the operation is still under way after the wait's timeout");
    }
    if (!driving) {
      changed_.wait_for(lock, kSleep);
    } else if (found == Look::kQuiet) {
      rest(lock, strategy);
    }
  }
  if (!in_background) waiting_threads_.note(strategy);
  if (!operation.status().ok()) send_reason();
  return operation.status();
}

void EngineDriver::ask(std::unique_lock<Gate>& lock, Waiter& waiter,
                       const Interrupted& interrupted) {
  waiter.set_away(true);
  pass_on();
  lock.unlock();
  const bool stop = interrupted();
  lock.lock();
  waiter.set_away(false);
  if (!stop || waiter.ended_untold()) return;
  engine_->interrupt("interrupted by its user");
  tell_ended();
}

// The newest thread inside drive() that is not away; nullptr leaves
// it to the progress thread.
EngineDriver::Waiter* EngineDriver::newest() const {
  Waiter* waiter = waiters_;
  while (waiter != nullptr && waiter->away()) waiter = waiter->next();
  return waiter;
}

// One look at the engine by the driving thread.
EngineDriver::Look EngineDriver::look(WaitStrategy& strategy) {
  bool poll = false;
  if (engine_->step()) {
    strategy.reset();
    tell_ended();
  } else if (strategy.spin(&poll)) {
    if (poll && engine_->operations().peers.poll(true)) strategy.reset();
    relax();
  } else {
    strategy.note_look();
    const bool moved = strategy.is_hurried() ? engine_->operations().peers.poll(strategy.asks())
                                             : engine_->watch();
    if (!moved) return Look::kQuiet;
    strategy.reset();
    tell_ended();
  }
  if (!strategy.overdue()) return Look::kBusy;
  strategy.note_look();
  (void)engine_->watch();
  tell_ended();
  return Look::kOverdue;
}

// Wakes threads whose operation another thread has driven to its end.
void EngineDriver::tell_ended() {
  bool any = false;
  for (Waiter* waiter = waiters_; waiter != nullptr; waiter = waiter->next()) {
    any |= waiter->ended_untold();
  }
  if (!any || (waiters_->next() == nullptr && !sleeping_)) return;
  if (sleeping_) wake_sleeper();
  changed_.notify_all();
}

// This thread stops driving, and the next one takes over. A thread that leaves short
// operations behind usually comes back for them soon. So the progress thread first naps,
// and ends its nap by itself.
void EngineDriver::pass_on() {
  if (newest() != nullptr) {
    changed_.notify_all();
  } else if (progress_thread_.joinable() && engine_->operations().active()) {
    visited_ |= engine_->operations().collectives.runs_short();
    if (!napping_) changed_.notify_all();
  }
}

void EngineDriver::rest(std::unique_lock<Gate>& lock, WaitStrategy& strategy) {
  if (strategy.yield()) {
    const Nanoseconds begin = oversubscribed_ ? 0 : clock().now();
    const bool leaves = !oversubscribed_ && waiting_threads_.leaves(begin);
    const int better = balances_ && !in_background ? cpu_balancer_.better_core(clock()) : -1;
    lock.unlock();
    if (better >= 0) {
      move_to_core(better);
    } else {
      leaves ? leave_core() : void(sched_yield());
    }
    if (!oversubscribed_ && !leaves) strategy.note_yield(clock().now() - begin);
    lock.lock();
  } else if (sleeping_ || stopping_) {
    changed_.wait_for(lock, kSleep);
  } else {
    sleep(lock);
  }
}

// Sleeps on all media at once. Armed media make their descriptors readable for every event after
// arm(); the step in between finds earlier events.
void EngineDriver::sleep(std::unique_lock<Gate>& lock) {
  sleeping_ = true;
  const auto& media = engine_->operations().peers.transports();
  bool quiet = true;
  for (const auto& medium : media) quiet &= medium->arm();
  if (quiet && !engine_->step()) {
    pollfd waits[8];
    nfds_t count = 0;
    waits[count++] = {wake_.get(), POLLIN, 0};
    for (const auto& medium : media) {
      if (medium->event_fd() >= 0 && count < 8) waits[count++] = {medium->event_fd(), POLLIN, 0};
    }
    lock.unlock();
    (void)::poll(waits, count, kSleepMilliseconds);
    eventfd_t rings = 0;
    if (waits[0].revents != 0) (void)eventfd_read(wake_.get(), &rings);
    lock.lock();
  }
  for (const auto& medium : media) medium->disarm();
  sleeping_ = false;
  tell_ended();
  changed_.notify_all();
}

void EngineDriver::wake_sleeper() {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

// Makes the driver, awake or asleep, look at a new operation.
void EngineDriver::call_driver() {
  if (sleeping_) wake_sleeper();
  if (newest() == nullptr) changed_.notify_all();
}

// The caller may never come back, so the progress thread delivers the reason of the failure to
// peers that could not take it yet.
void EngineDriver::send_reason() {
  if (engine_->owes_reason() && start_progress_thread().ok()) changed_.notify_all();
}

// Takes the lock if it is free and no other thread waits or sleeps, so that
// no thread needs a signal.
bool EngineDriver::enter_alone(std::unique_lock<Gate>& lock) {
  return !is_foreign() && lock.try_lock() && waiters_ == nullptr && !sleeping_ && !stopping_;
}

void EngineDriver::spin(const Operation& operation, Nanoseconds patience) {
  if (patience == 0) {
    // One pass: later calls can handle arrived segments as well, but a new operation must send now.
    do {
      (void)engine_->step(Engine::Part::kStarted);
    } while (engine_->operations().collectives.runs_short() &&
             engine_->operations().collectives.has_newcomer());
    return;
  }
  constexpr int kLooksPerTime = 8;
  WaitStrategy strategy = wait_strategy_of(false);
  Nanoseconds begin = 0;
  for (int looks = 1; !operation.done() && engine_->operations().are_short() && !gate_.is_wanted();
       ++looks) {
    if (look(strategy) != Look::kBusy) break;
    if (looks % kLooksPerTime != 0) continue;
    const Nanoseconds now = clock().now();
    if (begin == 0) begin = now;
    if (now - begin >= patience) break;
  }
  if (operation.done() && !operation.status().ok()) send_reason();
}

void EngineDriver::leave(bool wake) {
  visited_ = true;
  if (wake && resting_) changed_.notify_all();
}

void EngineDriver::close() {
  if (!foreign().ok()) return;
  const std::lock_guard<std::mutex> closing(closing_);
  std::thread finished;
  {
    std::unique_lock<Gate> lock(gate_);
    stopping_ = true;
    // A descriptor must not be closed while a thread sleeps on it.
    while (sleeping_) {
      wake_sleeper();
      changed_.wait_for(lock, kSleep);
    }
    engine_->close();
    tell_ended();
    changed_.notify_all();
    finished = std::move(progress_thread_);
  }
  if (finished.joinable()) finished.join();
}

// ---- The progress thread

Status EngineDriver::start_progress_thread() {
  if (progress_thread_.joinable() || stopping_) return Status();
  const SignalsBlocked blocked;
  try {
    progress_thread_ = std::thread([this] { run_progress_thread(); });
  } catch (const std::system_error& error) {
    return Status::error(Code::kTransport, "rank " + std::to_string(engine_->rank()) +
                                               " cannot start the progress thread (" +
                                               error.what() +
                                               "): raise the limit of processes (ulimit -u), or "
                                               "use blocking operations");
  }
  return Status();
}

void EngineDriver::run_progress_thread() {
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
    } else if (newest() != nullptr || !(engine_->operations().active() || engine_->owes_reason())) {
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
