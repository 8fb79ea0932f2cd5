// An engine with threads around it. Blocking calls drive the engine themselves; one progress thread
// drives asynchronous operations. This is the only file of the host's engine that starts a thread.
//
// One thread at a time drives the engine: the newest of those inside run() or drive(), because it
// is awake and its caller waits; the progress thread if there is none. The other threads wait for a
// signal that their operation has ended, or that they have become the driver.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

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

// Threads: any thread may call any method at any time, except the destructor. A reduction of the
// user runs under the communicator's lock: it must not call the communicator. Fork: in a child
// process every method answers kClosed.
class Communicator {
 public:
  // Deletes a communicator, which closes it. In a forked child it only drops
  // the object: memory, connections and locks belong to the parent, and its
  // other threads may have left them in any state.
  struct Retire {
    void operator()(Communicator* communicator) const;
  };
  using Handle = std::unique_ptr<Communicator, Retire>;

  // kInvalidArgument as Engine::create; kTransport when the system refuses a descriptor.
  static Status create(EngineOptions options, Handle* communicator);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Starts the operation and drives it to its end. The caller's memory is no longer used on return.
  template <typename Request>
  Status run(Request&& request, Nanoseconds timeout, const Interrupted& interrupted) {
    if (Status status = foreign(); !status.ok()) return status;
    std::unique_lock<Gate> lock(gate_);
    const auto operation = engine_->start(std::forward<Request>(request), timeout);
    return drive_locked(lock, *operation, kForever, interrupted);
  }

  // Waits for a message without receiving it. False if none has arrived within `patience`; the
  // communicator is then unchanged. `status` is the state of the communicator.
  bool probe(const ProbeRequest& request, Nanoseconds patience, const Interrupted& interrupted,
             Status* status);
  // Waits as probe() does, then receives the message if it fits in `memory`; a longer one stays.
  bool recv_within(const ProbeRequest& request, executor::Memory memory, Nanoseconds patience,
                   Nanoseconds timeout, const Interrupted& interrupted, Status* status);

  // Starts the operation and leaves it to the progress thread. The caller keeps its memory alive
  // until the operation is done. kTransport, with nothing started, if the thread cannot be created.
  template <typename Request>
  std::shared_ptr<Operation> start(Request&& request, Nanoseconds timeout) {
    if (Status status = foreign(); !status.ok()) return make_ended(std::move(status));
    const std::lock_guard<Gate> lock(gate_);
    if (Status status = start_progress_thread(); !status.ok()) {
      if constexpr (std::is_same_v<std::decay_t<Request>, CollectiveRequest>) {
        engine_->refuse(status.message());
      }
      return make_ended(std::move(status));
    }
    auto operation = engine_->start(std::forward<Request>(request), timeout);
    if (!operation->done()) call_driver();
    return operation;
  }

  // try_start() and try_drive() are for callers that hold a lock which other threads take while
  // they hold ours (Python's GIL). They never wait for another thread, and spin for at most
  // `patience`. They touch only short calls and messages, and operations that run concurrently with
  // these, so no reduction of a user runs meanwhile.
  //
  // try_start() enters the call; false, with nothing started, if that would take longer.
  // `operation` may belong to the caller and must live until it is done. If it is not done on
  // return, the caller drives it. With `leave` the caller may instead leave it to the progress
  // thread, which checks it after at most one nap (kNapMax).
  [[nodiscard]] bool try_start(const std::shared_ptr<Call>& call, const std::byte* input,
                               std::byte* output, const std::shared_ptr<Operation>& operation,
                               Nanoseconds timeout, Nanoseconds patience, bool leave);
  // Starts a message of at most Call::kShortBytes. Requires: `operation` is on the heap.
  [[nodiscard]] bool try_start(const MessageRequest& request,
                               const std::shared_ptr<Operation>& operation, Nanoseconds timeout,
                               Nanoseconds patience, bool leave);
  // Whether a call in place has nothing to do: a single rank leaves its memory unchanged, and no
  // other operation runs, waits or has failed before it.
  bool rests_alone() const { return engine_->size() == 1 && engine_->vacant() && !is_foreign(); }
  // Runs the whole call in a communicator of one rank. False, with nothing done, if another thread
  // has the lock or a collective is in progress. Requires: size() is 1.
  [[nodiscard]] bool try_alone(Call& call, const std::byte* input, std::byte* output,
                               Status* status);
  // Drives `operation` for at most `patience`; it may not be done on return.
  void try_drive(const Operation& operation, Nanoseconds patience);

  // start() and run() for calls; these may wait for other threads and operations.
  void start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             const std::shared_ptr<Operation>& operation, Nanoseconds timeout);
  Status run(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             const std::shared_ptr<Operation>& operation, Nanoseconds timeout,
             const Interrupted& interrupted);

  // Drives until `operation` is done, then gives its status. kTimeout, with the operation still in
  // progress, if `patience` ends first.
  Status drive(const Operation& operation, Nanoseconds patience, const Interrupted& interrupted);

  // Marks the calling thread as one that waits while other threads compute, as the
  // progress thread does. While no bytes arrive over a network, the thread leaves
  // its core to them. Applies to all communicators.
  static void work_in_background() { in_background = true; }

  // As the engine's functions; calls() takes no lock.
  std::uint64_t calls() const { return engine_->calls(); }
  void refuse(const std::string& why);
  void begin_call();
  void end_call();

  // The failure that ended this communicator, or ok.
  Status failure();
  // As the engine's functions, for operations on the device stream. The first takes no lock; the
  // others return the failure, or ok.
  void count_on_stream(bool replayable);
  Status look_on_stream(const std::string& operation, bool patient);
  Status fail_on_stream(const Status& status, const std::string& operation, double after);
  // Fails the communicator here, and on peers with kPeerLost, which names this rank and quotes
  // `why`. If it has failed before, no further reason is told. close() flushes the notice.
  Status abort(const std::string& why);
  // Closes in good order; running operations end with kClosed. Returns
  // when the progress thread has ended. Idempotent.
  void close();

  int rank() const { return engine_->rank(); }
  int size() const { return engine_->size(); }
  // Names of the ranks, as given to create().
  const std::vector<std::string>& names() const { return engine_->names(); }
  // "shm", "tcp", ...; "self" for this rank. Requires: 0 <= peer < size().
  std::string_view transport_of(int peer) const { return engine_->transport_of(peer); }

 private:
  class Waiter;
  enum class Look : std::uint8_t { kBusy, kQuiet, kOverdue };

  // Number of forks since the process began, counted in the children.
  static inline std::atomic<long> fork_generation{0};
  static void count_fork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }
  static long current_generation();

  Communicator(std::unique_ptr<Engine> engine, std::shared_ptr<Clock> clock, int cores);
  ~Communicator() = default;
  static std::shared_ptr<Operation> make_ended(Status status);
  bool probe_locked(std::unique_lock<Gate>& lock, const ProbeRequest& request, Nanoseconds patience,
                    const Interrupted& interrupted, Status* status);
  bool is_foreign() const { return fork_generation.load(std::memory_order_relaxed) != birth_; }
  Status foreign() const;
  Status drive_locked(std::unique_lock<Gate>& lock, const Operation& operation,
                      Nanoseconds patience, const Interrupted& interrupted);
  void ask(std::unique_lock<Gate>& lock, Waiter& waiter, const Interrupted& interrupted);
  Waiter* driver() const;
  WaitStrategy wait_strategy_of(bool background) const;
  Look look(WaitStrategy& strategy);
  [[nodiscard]] bool enter_alone(std::unique_lock<Gate>& lock);
  // Enters to start a short operation; with `leave` the progress thread exists then.
  [[nodiscard]] bool enter_briefly(std::unique_lock<Gate>& lock, bool leave);
  void leave_started(const Operation& operation);
  void spin(const Operation& operation, Nanoseconds patience);
  void tell_ended();
  void pass_on();
  void rest(std::unique_lock<Gate>& lock, WaitStrategy& strategy);
  void sleep(std::unique_lock<Gate>& lock);
  void wake_sleeper();
  void call_driver();
  void send_reason();
  Status start_progress_thread();
  void run_progress_thread();

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Clock> clock_;
  static inline thread_local bool in_background = false;

  std::mutex closing_;  // taken before gate_; a second close() waits until the first has ended
  Gate gate_;           // guards everything below and the engine
  std::condition_variable_any changed_;  // an operation has ended, or the driver has changed
  UniqueFd wake_;                        // eventfd: ends the sleep of the sleeping thread
  std::thread progress_thread_;
  Waiter* waiters_ = nullptr;  // threads inside drive_locked(), newest first
  bool sleeping_ = false;      // a thread sleeps on the media; at most one may
  bool stopping_ = false;
  bool resting_ = false;         // the progress thread sleeps until it is notified
  bool napping_ = false;         // the progress thread sleeps for a bounded time
  bool visited_ = false;         // short operations were left to it by a thread that will come back
  bool oversubscribed_ = false;  // this host has fewer cores than ranks
  bool balances_ = false;        // waiting ranks move to cores with fewer ranks
  bool wired_ = false;           // some peers are on other hosts
  bool by_wire_ = false;         // all peers are on other hosts
  WaitingThreads waiting_threads_;  // for threads that wait for their own operation
  CpuBalancer cpu_balancer_;        // for the same threads
  long birth_ = 0;                  // fork generation in which this object was created
  Communicator* next_forgotten_ = nullptr;
};

}  // namespace pycoll::engine
