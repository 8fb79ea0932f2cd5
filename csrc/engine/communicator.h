// A communicator of the host, for callers in any thread. Blocking calls drive the engine
// themselves; the progress thread drives asynchronous operations (engine_driver.h).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/brief_calls.h"
#include "engine/engine_driver.h"
#include "engine/stream_operations.h"

namespace pycoll::engine {

// A call with its memory and the operation that is to be finished. The caller may own `operation`
// if it outlives the run.
struct CallStart {
  std::shared_ptr<Call> call;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::shared_ptr<Operation> operation;
};

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

  // A request is a CollectiveRequest, a MessageRequest, or a CallStart.
  //
  // Starts the operation and drives it to its end. The caller's memory is no longer used on return.
  template <typename Request>
  Status run(Request&& request, Nanoseconds timeout, const Interrupted& interrupted) {
    if (Status status = driver_->foreign(); !status.ok()) return status;
    std::unique_lock<Gate> lock(driver_->gate());
    const auto operation = enter(std::forward<Request>(request), timeout);
    return driver_->drive(lock, *operation, kForever, interrupted);
  }
  // Starts the operation and leaves it to the progress thread. The caller keeps its memory alive
  // until the operation is done. kTransport, with nothing started, if the thread cannot be created.
  template <typename Request>
  std::shared_ptr<Operation> start(Request&& request, Nanoseconds timeout) {
    if (Status status = driver_->foreign(); !status.ok()) return end(request, std::move(status));
    const std::lock_guard<Gate> lock(driver_->gate());
    if (Status status = driver_->start_progress_thread(); !status.ok()) {
      if constexpr (!std::is_same_v<std::decay_t<Request>, MessageRequest>) {
        driver_->engine().refuse(status.message());
      }
      return end(request, std::move(status));
    }
    auto operation = enter(std::forward<Request>(request), timeout);
    if (!operation->done()) driver_->call_driver();
    return operation;
  }
  // Drives until `operation` is done, then gives its status. kTimeout, with the operation still in
  // progress, if `patience` ends first.
  Status drive(const Operation& operation, Nanoseconds patience, const Interrupted& interrupted);

  // Waits for a message without receiving it. False if none has arrived within `patience`; the
  // communicator is then unchanged. `status` is the state of the communicator.
  bool probe(const ProbeRequest& request, Nanoseconds patience, const Interrupted& interrupted,
             Status* status);
  // Waits as probe() does, then receives the message if it fits in `memory`; a longer one stays.
  bool recv_within(const ProbeRequest& request, executor::Memory memory, Nanoseconds patience,
                   Nanoseconds timeout, const Interrupted& interrupted, Status* status);

  // As Engine::refuse(), CallNumbers::begin_call() and CallNumbers::end_call().
  void refuse(const std::string& why);
  void begin_call();
  void end_call();

  // Fails the communicator here, and on peers with kPeerLost, which names this rank and quotes
  // `why`. If it has failed before, no further reason is told. close() flushes the notice.
  Status abort(const std::string& why);
  // Closes in good order; running operations end with kClosed. Returns
  // when the progress thread has ended. Idempotent.
  void close();

  // Short operations for callers that hold a lock which other threads take while they hold that of
  // the communicator, and operations on the device stream.
  const BriefCalls& brief() const { return brief_; }
  const StreamOperations& on_stream() const { return on_stream_; }

  // The failure that ended this communicator, or ok.
  Status failure() const;
  // As CallNumbers::calls(); takes no lock.
  std::uint64_t calls() const { return operations().numbers.calls(); }
  int rank() const { return operations().peers.rank(); }
  int size() const { return operations().peers.size(); }
  // Names of the ranks, as given to create().
  const std::vector<std::string>& names() const { return operations().peers.names(); }
  // By peer: "shm", "tcp", ...; "self" for this rank.
  const std::vector<std::string_view>& media() const { return operations().peers.media(); }

 private:
  explicit Communicator(std::unique_ptr<EngineDriver> driver)
      : driver_(std::move(driver)), brief_(*driver_), on_stream_(*driver_) {}
  ~Communicator() = default;

  const RankOperations& operations() const { return std::as_const(*driver_).engine().operations(); }
  template <typename Request>
  std::shared_ptr<Operation> enter(Request&& request, Nanoseconds timeout) {
    return driver_->engine().start(std::forward<Request>(request), timeout);
  }
  std::shared_ptr<Operation> enter(CallStart start, Nanoseconds timeout) {
    driver_->engine().start(std::move(start.call), start.input, start.output, start.operation,
                            timeout);
    return std::move(start.operation);
  }
  // An operation that has ended with `status` and was never started.
  template <typename Request>
  static std::shared_ptr<Operation> end(const Request& request, Status status) {
    std::shared_ptr<Operation> operation;
    if constexpr (std::is_same_v<Request, CallStart>) operation = request.operation;
    if (operation == nullptr) operation = std::make_shared<Operation>();
    operation->finish(std::move(status));
    return operation;
  }
  bool probe(std::unique_lock<Gate>& lock, const ProbeRequest& request, Nanoseconds patience,
             const Interrupted& interrupted, Status* status);

  const std::unique_ptr<EngineDriver> driver_;
  BriefCalls brief_;
  StreamOperations on_stream_;
  Communicator* next_forgotten_ = nullptr;
};

}  // namespace pycoll::engine
