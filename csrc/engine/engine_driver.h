// An engine with threads around it: which thread drives it, how threads wait, and the progress
// thread. This is the only file of the host's engine that starts a thread.
//
// One thread at a time drives the engine: the newest of those inside drive(), because it is awake
// and its caller waits; the progress thread if there is none. The other threads wait for a signal
// that their operation has ended, or that they have become the driver.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/unique_fd.h"
#include "engine/engine.h"
#include "engine/waiting/cpu_balancer.h"
#include "engine/waiting/gate.h"
#include "engine/waiting/wait_strategy.h"

namespace pycoll::engine {

// A thread that waits calls this at least every 50 ms; true stops the wait and fails the
// communicator. The thread holds no lock of the communicator meanwhile, and another thread drives,
// so the call may take any time. It must not throw.
using Interrupted = std::function<bool()>;

// Marks the calling thread as one that waits while other threads compute, as the progress thread
// does. While no bytes arrive over a network, the thread leaves its core to them. Applies to all
// communicators.
void work_in_background();

// Threads: as each function says. "With the lock": the caller holds gate(). Fork: in a child
// process only foreign(), is_foreign() and close() may be called.
class EngineDriver {
 public:
  // kInvalidArgument as Engine::create; kTransport when the system refuses a descriptor.
  static Status create(EngineOptions options, std::unique_ptr<EngineDriver>* driver);
  EngineDriver(const EngineDriver&) = delete;
  EngineDriver& operator=(const EngineDriver&) = delete;

  // kClosed in a forked child, in which the locks may be in any state. Any thread.
  Status foreign() const;
  bool is_foreign() const { return fork_generation.load(std::memory_order_relaxed) != birth_; }

  // Guards the engine, whose numbers and constant facts any thread may read without it.
  Gate& gate() { return gate_; }
  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }

  // Drives until `operation` is done, then gives its status. kTimeout, with the operation still in
  // progress, if `patience` ends first. With the lock.
  Status drive(std::unique_lock<Gate>& lock, const Operation& operation, Nanoseconds patience,
               const Interrupted& interrupted);
  // Makes the driving thread, awake or asleep, look at a new operation. With the lock.
  void call_driver();
  // Wakes threads whose operation another thread has driven to its end. With the lock.
  void tell_ended();
  // Makes sure that there is a progress thread. kTransport if it cannot be created. With the lock.
  Status start_progress_thread();

  // Takes the lock if it is free and no other thread waits or sleeps, so that no thread needs a
  // signal.
  [[nodiscard]] bool enter_alone(std::unique_lock<Gate>& lock);
  // Drives for at most `patience`, and only short operations; with 0, one pass. With the lock.
  void spin(const Operation& operation, Nanoseconds patience);
  // The calling thread leaves short operations to the progress thread, which looks after at most
  // one nap (kNapMax) unless a thread comes back for them. With the lock. `wake`: they may be new
  // to that thread.
  void leave(bool wake);

  // Closes the engine in good order. Returns when the progress thread has ended. Idempotent.
  void close();
  bool is_stopping() const { return stopping_; }  // with the lock

 private:
  class Waiter;
  enum class Look : std::uint8_t { kBusy, kQuiet, kOverdue };

  // Number of forks since the process began, counted in the children.
  static inline std::atomic<long> fork_generation{0};
  static void count_fork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }
  static long current_generation();

  EngineDriver(std::unique_ptr<Engine> engine, int cores);
  void ask(std::unique_lock<Gate>& lock, Waiter& waiter, const Interrupted& interrupted);
  Waiter* newest() const;
  WaitStrategy wait_strategy_of(bool background) const;
  Look look(WaitStrategy& strategy);
  void pass_on();
  void rest(std::unique_lock<Gate>& lock, WaitStrategy& strategy);
  void sleep(std::unique_lock<Gate>& lock);
  void wake_sleeper();
  void send_reason();
  void run_progress_thread();
  Clock& clock() const { return engine_->operations().peers.clock(); }

  std::unique_ptr<Engine> engine_;

  std::mutex closing_;  // taken before gate_; a second close() waits until the first has ended
  Gate gate_;           // guards everything below and the engine
  std::condition_variable_any changed_;  // an operation has ended, or the driver has changed
  UniqueFd wake_;                        // eventfd: ends the sleep of the sleeping thread
  std::thread progress_thread_;
  Waiter* waiters_ = nullptr;  // threads inside drive(), newest first
  bool sleeping_ = false;      // a thread sleeps on the media; at most one may
  bool stopping_ = false;
  bool resting_ = false;         // the progress thread sleeps until it is notified
  bool napping_ = false;         // the progress thread sleeps for a bounded time
  bool visited_ = false;         // short operations were left to it by a thread that will come back
  bool oversubscribed_ = false;  // this host has fewer cores than ranks
  bool balances_ = false;        // waiting ranks move to cores with fewer ranks
  int neighbours_ = 1;           // the ranks that share memory, this one included
  WaitingThreads waiting_threads_;  // for threads that wait for their own operation
  CpuBalancer cpu_balancer_;        // for the same threads
  long birth_ = 0;                  // fork generation in which this object was created
};

}  // namespace pycoll::engine
