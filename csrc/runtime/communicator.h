// An engine with threads around it: blocking calls that drive it themselves, and one progress
// thread for operations that nobody waits for. Of the host's engine this is the only file that
// starts a thread.
//
// One thread at a time drives the engine: the newest of those inside run() or drive(), because it
// is awake and its caller waits; the progress thread if there is none. The others wait to be told
// that their operation has ended, or that it is their turn to drive.
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
#include "runtime/engine.h"
#include "runtime/gate.h"
#include "runtime/pace.h"
#include "runtime/spread.h"

namespace pycoll::runtime {

// Looked at every 50 ms or more often by a thread that waits; true stops the wait and fails the
// communicator. Called without any lock of ours held; may take as long as it likes: another thread
// drives meanwhile. Must not throw.
using Interrupted = std::function<bool()>;

// Threads: every method may be called from any thread at any time, except the destructor. A
// reduction of the user runs under the communicator's lock: it must not call the communicator.
// Fork: in a child process every method answers kClosed.
class Communicator {
 public:
  // Deletes a communicator, which closes it. In a forked child it only forgets: memory, connections
  // and locks are the parent's, in whatever state its other threads had left them.
  struct Retire {
    void operator()(Communicator* communicator) const;
  };
  using Handle = std::unique_ptr<Communicator, Retire>;

  // kInvalidArgument as Engine::create; kTransport when the system refuses a descriptor.
  static Status create(EngineOptions options, Handle* communicator);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Starts the operation and drives it to its end. The caller's memory is free when this returns.
  template <typename Request>
  Status run(Request&& request, Nanoseconds timeout, const Interrupted& interrupted) {
    if (Status status = foreign(); !status.ok()) return status;
    std::unique_lock<Gate> lock(gate_);
    const auto operation = engine_->start(std::forward<Request>(request), timeout);
    return drive_locked(lock, *operation, kForever, interrupted);
  }

  // Waits for a message without receiving it; false where none has come within `patience`, with
  // nothing changed. `status` is that of the communicator.
  bool probe(const ProbeRequest& request, Nanoseconds patience, const Interrupted& interrupted,
             Status* status);

  // Starts the operation and leaves it to the progress thread; the caller keeps its memory alive
  // until the operation is done. kTransport, with nothing started, if there can be no thread.
  template <typename Request>
  std::shared_ptr<Operation> start(Request&& request, Nanoseconds timeout) {
    if (Status status = foreign(); !status.ok()) return ended(std::move(status));
    const std::lock_guard<Gate> lock(gate_);
    if (Status status = start_progress_thread(); !status.ok()) {
      if constexpr (std::is_same_v<std::decay_t<Request>, CollectiveRequest>) {
        engine_->refuse(status.message());
      }
      return ended(std::move(status));
    }
    auto operation = engine_->start(std::forward<Request>(request), timeout);
    if (!operation->done()) call_driver();
    return operation;
  }

  // For callers that hold a lock which others take inside ours (Python's GIL): these never wait for
  // another thread, and spin for `patience` at most. Only short calls and what runs beside them are
  // touched: no reduction of a user runs, and none has to be waited for.
  //
  // Enters the call; false, with nothing started, if that would take longer. `operation`, which may
  // be the caller's own, lives until it is done. If it is not on return, the caller drives it, or
  // with `leave` may leave it to the progress thread, which looks after it within a millisecond.
  [[nodiscard]] bool try_start(const std::shared_ptr<Call>& call, const std::byte* input,
                               std::byte* output, const std::shared_ptr<Operation>& operation,
                               Nanoseconds timeout, Nanoseconds patience, bool leave);
  // Whether a call in place has nothing to do: what one rank alone makes of its memory is what is
  // there, and nothing runs, waits or has failed that would have to come first.
  bool rests_alone() const { return engine_->size() == 1 && engine_->vacant() && !is_foreign(); }
  // In a world of one rank, runs the whole call. False, with nothing done, if another thread has
  // the communicator or a collective is under way. Requires: size() is 1.
  [[nodiscard]] bool try_alone(Call& call, const std::byte* input, std::byte* output,
                               Status* status);
  // Drives towards the end of `operation`, as far as that is quick.
  void try_drive(const Operation& operation, Nanoseconds patience);

  // start() and run() for calls, with whatever else is to be waited for.
  void start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             const std::shared_ptr<Operation>& operation, Nanoseconds timeout);
  Status run(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             const std::shared_ptr<Operation>& operation, Nanoseconds timeout,
             const Interrupted& interrupted);

  // Drives until `operation` is done, then gives its status. kTimeout, with the operation still
  // running, if `patience` ends first.
  Status drive(const Operation& operation, Nanoseconds patience, const Interrupted& interrupted);

  // The calling thread waits for operations, of any communicator, beside others that compute, as
  // the progress thread does: while a wire brings nothing it leaves them the core.
  static void work_in_background() { in_background = true; }

  // As the engine's; the first takes no lock.
  std::uint64_t calls() const { return engine_->calls(); }
  void refuse(const std::string& why);
  void begin_call();
  void end_call();

  // The failure that ended this communicator, or ok.
  Status failure();
  // As the engine's, for operations on devices; the first takes no lock, the others give the
  // failure, or ok.
  void count_beside(bool replayable);
  Status look_beside(const std::string& operation, bool patient);
  Status fail_beside(const Status& status, const std::string& operation, double after);
  // Ends everything here, and on peers with kPeerLost that names this rank and quotes `why`; of a
  // communicator that failed before, nothing more is told. close() sends it off.
  Status abort(const std::string& why);
  // Orderly; operations that run end with kClosed. Returns when the progress thread has ended.
  // Idempotent.
  void close();

  int rank() const { return engine_->rank(); }
  int size() const { return engine_->size(); }
  // Of the ranks, as they were given to create().
  const std::vector<std::string>& names() const { return engine_->names(); }
  // "shm", "tcp", ...; "self" for this rank. Requires: 0 <= peer < size().
  std::string_view transport_of(int peer) const { return engine_->transport_of(peer); }

 private:
  class Waiter;
  enum class Look : std::uint8_t { kBusy, kQuiet, kOverdue };

  // How often the process was forked, as seen by the children.
  static inline std::atomic<long> fork_generation{0};
  static void count_fork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }
  static long current_generation();

  Communicator(std::unique_ptr<Engine> engine, std::shared_ptr<Clock> clock, int cores);
  ~Communicator() = default;
  static std::shared_ptr<Operation> ended(Status status);
  bool is_foreign() const { return fork_generation.load(std::memory_order_relaxed) != birth_; }
  Status foreign() const;
  Status drive_locked(std::unique_lock<Gate>& lock, const Operation& operation,
                      Nanoseconds patience, const Interrupted& interrupted);
  void ask(std::unique_lock<Gate>& lock, Waiter& waiter, const Interrupted& interrupted);
  Waiter* driver() const;
  Pace pace_of(bool background) const;
  Look look(Pace& pace);
  [[nodiscard]] bool enter_alone(std::unique_lock<Gate>& lock);
  void spin(const Operation& operation, Nanoseconds patience);
  void tell_ended();
  void pass_on();
  void rest(std::unique_lock<Gate>& lock, Pace& pace);
  void sleep(std::unique_lock<Gate>& lock);
  void wake_sleeper();
  void call_driver();
  void send_reason();
  Status start_progress_thread();
  void run_progress_thread();

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<Clock> clock_;
  static inline thread_local bool in_background = false;

  std::mutex closing_;  // taken before gate_: who closes second waits until all is closed
  Gate gate_;           // guards everything below and the engine
  std::condition_variable_any changed_;  // an operation has ended, or someone else is to drive
  UniqueFd wake_;                        // eventfd: ends the sleep of the thread that sleeps
  std::thread progress_thread_;
  Waiter* waiters_ = nullptr;  // threads inside drive_locked(), the newest first
  bool sleeping_ = false;      // a thread sleeps on the media; nobody else may
  bool stopping_ = false;
  bool resting_ = false;  // the progress thread sleeps until it is called
  bool napping_ = false;  // the progress thread sleeps for a moment, and wakes by itself
  bool visited_ = false;  // short operations were left to it, by a thread that will come back
  bool oversubscribed_ = false;  // fewer cores than ranks, on this host
  bool wired_ = false;           // some peers are on other hosts
  bool by_wire_ = false;         // all are
  Company company_;              // of threads that wait for their own operation
  Spread spread_;                // alike
  long birth_ = 0;               // fork generation that made this object
  Communicator* next_forgotten_ = nullptr;
};

}  // namespace pycoll::runtime
