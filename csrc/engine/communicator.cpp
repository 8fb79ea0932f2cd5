#include "engine/communicator.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>

#include "base/cores.h"

namespace pycoll::engine {
namespace {

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
  for (const auto& medium : engine.transports()) {
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

}  // namespace

// A thread inside drive_locked(). Created and destroyed under the lock.
class Communicator::Waiter {
 public:
  Waiter(Communicator& communicator, const Operation& operation)
      : communicator_(communicator), operation_(operation), next_(communicator.waiters_) {
    communicator.waiters_ = this;
    // The new thread takes over from a sleeping one, and may have to sleep on the media itself.
    if (communicator.sleeping_) communicator.wake_sleeper();
  }
  ~Waiter() {
    Waiter** place = &communicator_.waiters_;
    while (*place != this) place = &(*place)->next_;
    *place = next_;
    communicator_.pass_on();
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
  Communicator& communicator_;
  const Operation& operation_;
  Waiter* next_;
  bool away_ = false;  // asks for interrupts without the lock; other threads drive
  bool told_ = false;
};

void Communicator::Retire::operator()(Communicator* communicator) const {
  if (communicator->foreign().ok()) {
    communicator->close();
    delete communicator;
    return;
  }
  // Even destroying the condition variable would wait for threads that do not exist in the child.
  static std::atomic<Communicator*> forgotten{nullptr};
  communicator->next_forgotten_ = forgotten.exchange(communicator);
}

Status Communicator::create(EngineOptions options, Handle* communicator) {
  auto clock = options.clock;
  const int cores = options.cores > 0 ? options.cores : usable_cores();
  const bool cpu_balancing = options.cpu_balancing;
  std::unique_ptr<Engine> engine;
  Status status = Engine::create(std::move(options), &engine);
  if (!status.ok()) return status;
  Handle made(new Communicator(std::move(engine), std::move(clock), cores));
  made->balances_ = made->oversubscribed_ && cpu_balancing;
  if (made->oversubscribed_) made->cpu_balancer_.share_cores();
  if (!made->wake_.valid()) {
    return Status::error(Code::kTransport, "rank " + std::to_string(made->rank()) +
                                               " cannot make an eventfd: out of file descriptors? "
                                               "Raise the limit of open files (ulimit -n)");
  }
  *communicator = std::move(made);
  return Status();
}

Communicator::Communicator(std::unique_ptr<Engine> engine, std::shared_ptr<Clock> clock, int cores)
    : engine_(std::move(engine)),
      clock_(std::move(clock)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      cpu_balancer_(rank(), size(), cores, core_hints_of(*engine_)),
      birth_(current_generation()) {
  int neighbours = 1;
  for (int peer = 0; peer < size(); ++peer) neighbours += transport_of(peer) == "shm" ? 1 : 0;
  oversubscribed_ = neighbours > cores;
  wired_ = neighbours < size();
  by_wire_ = wired_ && neighbours == 1;
}

// Within a host, messages need the cores themselves, so leaving the core to others gains nothing.
WaitStrategy Communicator::wait_strategy_of(bool background) const {
  return background && wired_
             ? WaitStrategy::background()
             : WaitStrategy(oversubscribed_, waiting_threads_.together(), by_wire_);
}

long Communicator::current_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;
  return fork_generation.load(std::memory_order_relaxed);
}

// Called before any lock is taken: in a child, threads that do not exist there may hold the locks.
Status Communicator::foreign() const {
  if (!is_foreign()) return Status();
  return Status::error(Code::kClosed,
                       "this communicator belongs to the parent process; a forked child cannot use "
                       "it: call pycoll.init() in the child, or start it with spawn");
}

std::shared_ptr<Operation> Communicator::make_ended(Status status) {
  auto operation = std::make_shared<Operation>();
  operation->finish(std::move(status));
  return operation;
}

Status Communicator::drive(const Operation& operation, Nanoseconds patience,
                           const Interrupted& interrupted) {
  if (operation.done()) return operation.status();
  if (Status status = foreign(); !status.ok()) return status;
  std::unique_lock<Gate> lock(gate_);
  return drive_locked(lock, operation, patience, interrupted);
}

bool Communicator::probe(const ProbeRequest& request, Nanoseconds patience,
                         const Interrupted& interrupted, Status* status) {
  if (*status = foreign(); !status->ok()) return false;
  std::unique_lock<Gate> lock(gate_);
  return probe_locked(lock, request, patience, interrupted, status);
}

bool Communicator::probe_locked(std::unique_lock<Gate>& lock, const ProbeRequest& request,
                                Nanoseconds patience, const Interrupted& interrupted,
                                Status* status) {
  const auto operation = engine_->start(request);
  *status = drive_locked(lock, *operation, patience, interrupted);
  if (operation->done()) return status->ok();
  engine_->forget_probe(*operation);
  *status = Status();
  return false;
}

bool Communicator::recv_within(const ProbeRequest& request, executor::Memory memory,
                               Nanoseconds patience, Nanoseconds timeout,
                               const Interrupted& interrupted, Status* status) {
  if (*status = foreign(); !status->ok()) return false;
  std::unique_lock<Gate> lock(gate_);
  const Nanoseconds begin = clock_->now();
  const auto left = [&] {
    return patience == kForever ? kForever
                                : std::max<Nanoseconds>(0, patience - (clock_->now() - begin));
  };
  // Another thread may receive the message before this one has the lock again. A probe that is
  // answered at once finds one that is still here.
  std::shared_ptr<Operation> found;
  do {
    if (!probe_locked(lock, request, left(), interrupted, status)) return false;
    found = engine_->start(request);
    if (!found->done()) engine_->forget_probe(*found);
  } while (!found->done());
  if (*status = found->status(); !status->ok()) return false;
  const executor::Probed& message = *request.found;
  if (message.bytes > memory.bytes) return true;
  const auto operation =
      engine_->start(executor::MessageRequest{executor::MessageRequest::Kind::kRecv,
                                              message.source,
                                              message.tag,
                                              {memory.data, message.bytes}},
                     timeout);
  *status = drive_locked(lock, *operation, kForever, interrupted);
  return status->ok();
}

Status Communicator::drive_locked(std::unique_lock<Gate>& lock, const Operation& operation,
                                  Nanoseconds patience, const Interrupted& interrupted) {
  Waiter me(*this, operation);
  WaitStrategy strategy = wait_strategy_of(in_background);
  const Nanoseconds begin = patience == kForever ? 0 : clock_->now();
  Nanoseconds asked = 0;
  while (!operation.done()) {
    if (gate_.is_wanted()) gate_.give_way();
    const bool driving = driver() == &me;
    const Look found = driving ? look(strategy) : Look::kQuiet;
    if (found == Look::kBusy) continue;
    if (operation.done()) break;
    if (found == Look::kQuiet && driving && patience == kForever && strategy.is_hurried()) {
      rest(lock, strategy);
      continue;
    }
    const Nanoseconds now = clock_->now();
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

void Communicator::ask(std::unique_lock<Gate>& lock, Waiter& waiter,
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

// The newest thread inside drive_locked() that is not away; nullptr leaves
// it to the progress thread.
Communicator::Waiter* Communicator::driver() const {
  Waiter* waiter = waiters_;
  while (waiter != nullptr && waiter->away()) waiter = waiter->next();
  return waiter;
}

// One look at the engine by the driving thread.
Communicator::Look Communicator::look(WaitStrategy& strategy) {
  bool poll = false;
  if (engine_->step()) {
    strategy.reset();
    tell_ended();
  } else if (strategy.spin(&poll)) {
    if (poll && engine_->poll()) strategy.reset();
    relax();
  } else {
    strategy.note_look();
    const bool moved =
        strategy.is_hurried() ? engine_->move_bytes(strategy.asks()) : engine_->watch();
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
void Communicator::tell_ended() {
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
void Communicator::pass_on() {
  if (driver() != nullptr) {
    changed_.notify_all();
  } else if (progress_thread_.joinable() && engine_->active()) {
    visited_ |= engine_->runs_short();
    if (!napping_) changed_.notify_all();
  }
}

void Communicator::rest(std::unique_lock<Gate>& lock, WaitStrategy& strategy) {
  if (strategy.yield()) {
    const Nanoseconds begin = oversubscribed_ ? 0 : clock_->now();
    const bool leaves = !oversubscribed_ && waiting_threads_.leaves(begin);
    const int better = balances_ && !in_background ? cpu_balancer_.better_core(*clock_) : -1;
    lock.unlock();
    if (better >= 0) {
      move_to_core(better);
    } else {
      leaves ? leave_core() : void(sched_yield());
    }
    if (!oversubscribed_ && !leaves) strategy.note_yield(clock_->now() - begin);
    lock.lock();
  } else if (sleeping_ || stopping_) {
    changed_.wait_for(lock, kSleep);
  } else {
    sleep(lock);
  }
}

// Sleeps on all media at once. Armed media make their descriptors readable for every event after
// arm(); the step in between finds earlier events.
void Communicator::sleep(std::unique_lock<Gate>& lock) {
  sleeping_ = true;
  const auto& media = engine_->transports();
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

void Communicator::wake_sleeper() {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

// Makes the driver, awake or asleep, look at a new operation.
void Communicator::call_driver() {
  if (sleeping_) wake_sleeper();
  if (driver() == nullptr) changed_.notify_all();
}

// The caller may never come back, so the progress thread delivers the reason of the failure to
// peers that could not take it yet.
void Communicator::send_reason() {
  if (engine_->owes_reason() && start_progress_thread().ok()) changed_.notify_all();
}

void Communicator::refuse(const std::string& why) {
  if (!foreign().ok()) return;
  const std::lock_guard<Gate> lock(gate_);
  engine_->refuse(why);
  tell_ended();
}

void Communicator::begin_call() {
  if (!foreign().ok()) return;
  const std::lock_guard<Gate> lock(gate_);
  engine_->begin_call();
}

void Communicator::end_call() {
  if (!foreign().ok()) return;
  const std::lock_guard<Gate> lock(gate_);
  engine_->end_call();
}

Status Communicator::failure() {
  if (Status status = foreign(); !status.ok()) return status;
  const std::lock_guard<Gate> lock(gate_);
  return engine_->failure();
}

void Communicator::count_on_stream(bool replayable) { engine_->count_on_stream(replayable); }

Status Communicator::look_on_stream(const std::string& operation, bool patient) {
  if (Status status = foreign(); !status.ok()) return status;
  const std::lock_guard<Gate> lock(gate_);
  engine_->look_on_stream(operation, patient);
  tell_ended();
  return engine_->failure();
}

Status Communicator::fail_on_stream(const Status& status, const std::string& operation,
                                    double after) {
  if (Status wrong = foreign(); !wrong.ok()) return wrong;
  const std::lock_guard<Gate> lock(gate_);
  engine_->fail_on_stream(status, operation, after);
  tell_ended();
  return engine_->failure();
}

Status Communicator::abort(const std::string& why) {
  if (Status status = foreign(); !status.ok()) return status;
  const std::lock_guard<Gate> lock(gate_);
  engine_->interrupt(why);
  tell_ended();
  return Status();
}

void Communicator::close() {
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

}  // namespace pycoll::engine
