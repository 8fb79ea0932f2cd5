// The engine of one rank in one communicator: it starts operations, moves them, and ends them.
//
// The engine never blocks and never sleeps. step() is the fast path: it advances the operations.
// watch() is the slow path of a rank that waits: it polls the media and looks at the peers
// (diagnosis.h). It turns a dead peer, a disagreement or a passed deadline into the failure of the
// communicator. A failure is final: every open and every later operation ends with it.
//
// Collectives end in the order started (collectives.h); messages run concurrently with them
// (open_messages.h). Notices, deadlines, disagreement and loss concern the oldest collective only;
// each later one is checked when it becomes the oldest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/status.h"
#include "engine/diagnosis/diagnosis.h"
#include "engine/operations/rank_operations.h"
#include "executor/request.h"

namespace pycoll::engine {

// One thread at a time (the communicator's lock, or a test that steps many engines).
class Engine {
 public:
  // kInvalidArgument names a peer that no transport reaches.
  static Status create(EngineOptions options, std::unique_ptr<Engine>* engine);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Enters a collective. An invalid request ends with kInvalidArgument, naming this rank, and is
  // refused as by refuse(). If other collectives run, the request is checked when they have ended.
  // The timeout counts from its first wait as the oldest running collective. kForever: no timeout.
  std::shared_ptr<Operation> start(CollectiveRequest request, Nanoseconds timeout);
  // Starts a call. `input` and `output` have the lengths of the call's request. If other
  // collectives run, the call waits or runs concurrently. It allocates nothing, and binds only in
  // its first few runs. `operation` may point to an object that the caller owns and keeps until the
  // run has ended.
  void start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             std::shared_ptr<Operation> operation, Nanoseconds timeout);
  // Starts a message, whose timeout counts from now; see OpenMessages::start().
  std::shared_ptr<Operation> start(const MessageRequest& request, Nanoseconds timeout,
                                   std::shared_ptr<Operation> operation = nullptr) {
    return operations_.messages.start(request, timeout, std::move(operation));
  }
  // Refuses the collective that this rank would start now, for the reason `why`. It counts as
  // started, so the sequence numbers of ranks stay equal. On peers it ends with kInvalidArgument,
  // naming this rank, once they wait in it; the communicator continues. If peers may still access
  // memory of a rank in place, the communicator fails instead, on all ranks, with that error.
  void refuse(const std::string& why);

  enum class Part : std::uint8_t {
    kAll,
    kStarted,  // collectives alone, for a caller that has just started one and does not wait for it
    kMessages,
  };
  // Does a bounded piece of work; true if anything moved. Returns when a collective ends, even if
  // more could move. kStarted: see Collectives::step(); one call then handles several arrived
  // segments.
  bool step(Part part = Part::kAll) {
    if (part == Part::kMessages) return step_messages();
    const bool moved = advance(operations_.collectives.step(part == Part::kAll));
    if (part == Part::kStarted || !failure().ok()) return moved;
    return step_messages() || moved;
  }
  // Polls the media, does a step, and looks at the peers; true if anything moved or changed.
  bool watch();

  // Looks at the peers for operations on the device stream; see Diagnosis. Closing the communicator
  // ends it.
  void look_on_stream(const std::string& operation, bool patient);
  // Reports that an operation on the device stream has failed after `after` seconds. The
  // communicator fails with its code, here and on peers.
  void fail_on_stream(const Status& status, const std::string& operation, double after);
  // Fails the communicator with kInterrupted here, and on peers with kPeerLost, which names this
  // rank and `why`.
  void interrupt(const std::string& why);
  // Closes in good order: open operations end with kClosed, and peers see the link closed.
  // Idempotent.
  void close();

  // The operations. Callers use them to start and end probes, number calls, run calls of a
  // communicator of one rank, and poll the media.
  RankOperations& operations() { return operations_; }
  const RankOperations& operations() const { return operations_; }

  const Status& failure() const { return diagnosis_.report().failure(); }
  bool is_closed() const { return operations_.peers.is_closed(); }
  // Whether the reason of a failure has not been sent to some peer yet, because its channel is
  // full; watch() keeps sending it.
  bool owes_reason() const;
  int rank() const { return operations_.peers.rank(); }
  int size() const { return operations_.peers.size(); }

 private:
  explicit Engine(EngineOptions options);
  bool advance(Collectives::Step step) {
    if (step.event == Collectives::Event::kNone) [[likely]]
      return step.moved;
    return conclude(step);
  }
  bool conclude(Collectives::Step step);
  bool step_messages();
  void tell_refused() {
    if (operations_.collectives.has_refused()) [[unlikely]] {
      (void)conclude({true, Collectives::Event::kRefused});
    }
  }
  // Ends all operations, once, if the communicator has failed.
  void settle();

  RankOperations operations_;
  Diagnosis diagnosis_;
  bool ended_ = false;
};

}  // namespace pycoll::engine
