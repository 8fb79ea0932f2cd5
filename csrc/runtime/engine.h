// One rank's operations in one communicator: their order, their channels, and how they end.
//
// The engine never blocks and never sleeps. step() is the fast path: it advances what is active.
// watch() is the slow path of a rank that waits: it polls the media, tells peers where this rank
// is, reads where they are, and turns a dead peer, a disagreement or a passed deadline into the
// failure of the communicator. A failure is final: every open and every later operation ends with
// it.
//
// Collectives run one at a time in the order started; messages run beside them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "runtime/call.h"
#include "runtime/execution.h"
#include "runtime/mailbox.h"
#include "runtime/operation.h"
#include "runtime/request.h"
#include "runtime/verdict.h"
#include "transport/transport.h"

namespace pycoll::runtime {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  // Every peer is reached by the first transport that has a link to it.
  std::vector<std::shared_ptr<transport::Transport>> transports;
  std::vector<std::string> names;  // names[r]: "host:pid", for error texts
  std::shared_ptr<Clock> clock;
};

// One thread at a time (the communicator's lock, or a test that steps many engines).
class Engine final : public ChannelSource {
 public:
  // kInvalidArgument names a peer that no transport reaches.
  static Status create(EngineOptions options, std::unique_ptr<Engine>* engine);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Enters an operation. A wrong request ends with kInvalidArgument, uses up no sequence number and
  // leaves the communicator as it was; behind other collectives that is found out at its turn.
  // `timeout` of a message counts from now, of a collective from when it first waits at its turn;
  // kForever is none.
  std::shared_ptr<Operation> start(CollectiveRequest request, Nanoseconds timeout);
  std::shared_ptr<Operation> start(const MessageRequest& request, Nanoseconds timeout);
  // The same for a call, with this memory of the lengths that its request has. Behind another
  // collective it waits like any; at its turn it allocates nothing and binds only the first time.
  // `operation` may belong to the caller if it outlives the run.
  void start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             std::shared_ptr<Operation> operation, Nanoseconds timeout);
  // Whether no collective runs or waits.
  bool idle() const { return !running_; }
  // Whether the collective that runs is a short call.
  bool runs_short() const { return running_ && current_.call != nullptr; }

  // A bounded piece of work; true if anything moved. Returns when a collective ends, even if more
  // could move.
  bool step();
  bool watch();  // true if anything moved or changed
  bool poll();   // moves bytes on all media; true if any moved
  bool active() const;

  // Ends everything with kInterrupted here and kPeerLost, naming this rank, elsewhere.
  void interrupt();
  // Orderly: open operations end with kClosed; peers see the link closed. Idempotent.
  void close();

  const Status& failure() const { return failure_; }
  bool closed() const { return closed_; }
  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  // "shm", "tcp", ...; "self" for this rank.
  std::string_view transport_of(int peer) const;
  const std::vector<std::shared_ptr<transport::Transport>>& transports() const {
    return options_.transports;
  }

  transport::SendChannel& send_channel(int peer, std::uint32_t number) override;
  transport::RecvChannel& recv_channel(int peer, std::uint32_t number) override;

 private:
  // A collective that runs or waits for its turn.
  struct Pending {
    std::shared_ptr<Call> call;  // nullptr: `request` says what to do
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
    std::shared_ptr<Operation> operation;
    Nanoseconds timeout = 0;
    Nanoseconds deadline = 0;
  };
  struct Queued {
    Pending pending;
    CollectiveRequest request;
  };
  // An open message.
  struct Deadline {
    std::weak_ptr<Operation> operation;
    int peer = 0;
    bool receiving = false;
    Nanoseconds timeout = 0;
    Nanoseconds at = 0;
  };

  explicit Engine(EngineOptions options);
  void begin_next();
  Status fits(const CollectiveRequest& request) const;
  bool begin(Pending pending, CollectiveRequest* request);
  Status enter(Pending& pending, CollectiveRequest* request);
  void finish_current(Status status);
  bool step_messages();
  void drop_ended_messages();
  void end_all(const Status& status);

  void announce();
  bool look_at_notices();
  bool look_at_links(bool moved);
  void look_at_deadlines(Nanoseconds now);
  bool awaits(int peer) const;

  void disagree(std::uint64_t sequence);
  void resolve_disagreement(Nanoseconds now);
  void expire(const Overdue& overdue);
  void hear_timeout(const transport::Notice& notice);
  void hear_loss(int peer, const transport::Notice& notice);
  std::vector<Standing> standings();
  std::vector<int> absent();
  std::string current_text() const;
  void give_up(const Status& status, int culprit, const std::string& detail);
  void post(Code failure, int culprit, const std::string& detail);

  EngineOptions options_;
  std::vector<transport::Link*> links_;              // by peer; nullptr for this rank
  std::vector<std::string_view> media_;              // by peer
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;  // by peer, made on first use
  Pending current_;                                  // what runs
  std::deque<Queued> queue_;                         // what waits for its end, in order
  Execution own_execution_;                          // of requests; calls bring theirs
  Execution* execution_ = &own_execution_;           // of what runs
  bool running_ = false;
  bool announced_ = false;
  Nanoseconds began_ = 0;
  std::vector<Deadline> message_deadlines_;
  std::uint64_t sequence_ = 0;
  transport::Descriptor descriptor_;  // of operation sequence_
  Status failure_;
  std::uint64_t disputed_ = 0;  // operation about which ranks disagree; 0: none
  Nanoseconds dispute_ends_ = 0;
  Standing disputed_standing_;  // of this rank, as it told its peers
  bool closed_ = false;
};

}  // namespace pycoll::runtime
