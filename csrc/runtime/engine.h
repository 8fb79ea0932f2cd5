// One rank's operations in one communicator: their order, their channels, and how they end.
//
// The engine never blocks and never sleeps. step() is the fast path: it advances what is active.
// watch() is the slow path of a rank that waits: it polls the media, tells peers where this rank
// is, reads where they are, and turns a dead peer, a disagreement or a passed deadline into the
// failure of the communicator. A failure is final: every open and every later operation ends with
// it.
//
// Collectives run in the order started and end in that order; messages run beside them. Calls that
// follow each other may be under way at once, if none touches memory that another one writes: each
// channel still serves them one after the other (Turn), so that an earlier one runs as if it were
// alone. What peers are told, deadlines, disagreement and loss concern the first of them only; the
// others' time comes when they are the first.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "runtime/call.h"
#include "runtime/execution.h"
#include "runtime/mailbox.h"
#include "runtime/numbers.h"
#include "runtime/operation.h"
#include "runtime/request.h"
#include "runtime/ring.h"
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
  // On which the ranks of this host may run, all together; 0: those of the calling thread.
  int cores = 0;
};

// One thread at a time (the communicator's lock, or a test that steps many engines).
class Engine final : public ChannelSource {
 public:
  // kInvalidArgument names a peer that no transport reaches.
  static Status create(EngineOptions options, std::unique_ptr<Engine>* engine);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Enters an operation. A wrong request ends with kInvalidArgument, naming this rank, and is
  // refused as by refuse(); behind other collectives that is found out at its turn.
  // `timeout` of a message counts from now, of a collective from when it first waits at its turn;
  // kForever is none.
  std::shared_ptr<Operation> start(CollectiveRequest request, Nanoseconds timeout);
  std::shared_ptr<Operation> start(const MessageRequest& request, Nanoseconds timeout);
  // Ends when such a message has come, or everything fails; it has no deadline of its own.
  std::shared_ptr<Operation> start(const ProbeRequest& request);
  // Nobody waits for such an operation any more.
  void forget_probe(const Operation& operation);
  // The same for a call, with this memory of the lengths that its request has. Behind other
  // collectives it waits or runs along; it allocates nothing and binds only the first few times.
  // `operation` may belong to the caller if it outlives the run.
  void start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             std::shared_ptr<Operation> operation, Nanoseconds timeout);
  // This rank takes no part in the collective that it would start now, for this reason. That counts
  // as started, so that ranks stay in step. On peers it ends with kInvalidArgument, naming this
  // rank, once they wait in it, and all goes on; only where peers may still read or write the
  // memory of one of them where it lies does everything end, on all ranks, with that error.
  void refuse(const std::string& why);
  // Changes whenever something is started or refused, here or beside the engine; any thread.
  std::uint64_t calls() const {
    const std::uint64_t besides = besides_.load(std::memory_order_relaxed);
    return called_.load(std::memory_order_relaxed) + (besides == kUncounted ? 0 : besides);
  }
  // Collectives that are started until end_call() are parts of one call: a peer that refuses one of
  // them takes no part in the later ones either. A call inside a call is a part of it.
  void begin_call() {
    if (calls_open_++ == 0) parts_ = Parts::kFirst;
  }
  void end_call() {
    if (--calls_open_ == 0) parts_ = Parts::kNone;
  }

  // Runs a call of a world of one rank from beginning to end. Requires: size() is 1 and idle().
  Status run_alone(Call& call, const std::byte* input, std::byte* output);
  // Whether no collective runs or waits.
  bool idle() const { return running_.empty(); }
  // Whether so it is, and nothing has failed; for any thread, as of a moment ago.
  bool vacant() const { return vacant_.load(std::memory_order_acquire); }
  // Whether the collective that runs is a short call.
  bool runs_short() const { return !running_.empty() && running_.front().pending.call != nullptr; }

  // A bounded piece of work; true if anything moved. Returns when a collective ends, even if more
  // could move.
  bool step();
  // The same for who has just started something and waits for nothing: collectives that were found
  // blocked are asked again only if an older one has moved, and the oldest one only when no more
  // may run. So news are taken in several at a time: 64 calls of 1 KiB, started one after the other
  // and then waited for, took 0.98 of the time of as many that were waited for each, instead of
  // 1.04.
  bool step_started();
  // Whether a collective has begun, as others do when one ends, that has not moved at all yet.
  bool has_newcomer() const { return !running_.empty() && !running_[running_.size() - 1].asked; }
  bool watch();  // true if anything moved or changed
  bool poll();   // moves bytes on all media; true if any moved
  // The same on the media that need it to move bytes; on `all` if peers' states are wanted too.
  bool carry(bool all);
  bool active() const;
  // Whether the reason of a failure has not left for some peer that takes nothing yet: watch() goes
  // on sending it.
  bool owes_reason() const;

  // An operation of the same ranks beside the engine, on devices, has been called; collectives and
  // those are called in one order on all ranks. `replayable`: it may run again without a call, so
  // that from now on nothing follows from counts. Any thread.
  void count_beside(bool replayable);
  // For such operations that have waited for a while.
  // Looks whether a peer has failed or died, has left unless `patient`, or is at a collective
  // that this rank will call after `operation` only: then everything ends with what watch() would
  // say, and failure() tells.
  void look_beside(const std::string& operation, bool patient);
  // Such an operation has failed after so many seconds: everything ends, here and on peers, with
  // its code.
  void fail_beside(const Status& status, const std::string& operation, double after);

  // Ends everything with kInterrupted here and kPeerLost, naming this rank and why, elsewhere.
  void interrupt(const std::string& why);
  // Orderly: open operations end with kClosed; peers see the link closed. Idempotent.
  void close();

  const Status& failure() const { return failure_; }
  bool closed() const { return closed_; }
  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::vector<std::string>& names() const { return options_.names; }
  // "shm", "tcp", ...; "self" for this rank.
  std::string_view transport_of(int peer) const;
  const std::vector<std::shared_ptr<transport::Transport>>& transports() const {
    return options_.transports;
  }

  transport::SendChannel& send_channel(int peer, std::uint32_t number) override;
  transport::RecvChannel& recv_channel(int peer, std::uint32_t number) override;
  Turn& send_turn(int peer, std::uint32_t number) override;
  Turn& recv_turn(int peer, std::uint32_t number) override;
  std::uint64_t& sweeps() override { return sweeps_; }
  bool is_dropped(std::uint64_t sequence) const override { return dropped_.contains(sequence); }

 private:
  // A collective that runs or waits for its turn.
  struct Pending {
    std::shared_ptr<Call> call;  // nullptr: `request` says what to do
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
    std::shared_ptr<Operation> operation;
    Nanoseconds timeout = 0;
    std::uint64_t sequence = 0;
    Nanoseconds deadline = 0;
  };
  enum class Parts : std::uint8_t { kNone, kFirst, kMore };
  struct Queued {
    Pending pending;
    std::unique_ptr<CollectiveRequest> request;
  };
  struct Running {
    Pending pending;
    Execution* execution = nullptr;
    bool* busy = nullptr;  // of the call's run
    bool over = false;     // its rows have run; it ends when all before it have
    bool asked = false;    // it has run as far as it could once
  };
  struct Turns {
    std::array<Turn, transport::kChannelsMax> send;
    std::array<Turn, transport::kChannelsMax> recv;
  };
  // An open message.
  struct Deadline {
    std::weak_ptr<Operation> operation;
    LateMessage::Kind kind = LateMessage::Kind::kRecv;
    int peer = 0;
    std::uint32_t tag = 0;
    Nanoseconds timeout = 0;
    Nanoseconds at = 0;
  };

  struct OpenProbe {
    ProbeRequest request;
    std::shared_ptr<Operation> operation;
  };

  explicit Engine(EngineOptions options);
  std::uint64_t next_sequence();
  void begin_next();
  // Behind whatever may have changed what vacant() says.
  void note_vacancy() {
    const bool vacant = running_.empty() && queue_.empty() && failure_.ok();
    vacant_.store(vacant, std::memory_order_release);  // pairs with the load in vacant()
  }
  Status fits(const CollectiveRequest& request) const;
  bool may_begin(const Pending& pending) const;
  // The operation tells if it cannot begin.
  void begin(Pending&& pending, CollectiveRequest* request);
  Status enter(Running& entering, CollectiveRequest* request);
  Status bind(Call& call, Call::Run& run, const std::byte* input, std::byte* output);
  void lead();
  bool step_collectives(bool all);
  bool end_leaders();
  bool is_given_up(std::uint64_t sequence);
  bool step_messages();
  Mailbox& mailbox_of(int peer);
  void receive_from_any(const MessageRequest& request, std::shared_ptr<Operation> operation);
  void drop_ended_messages();
  void answer_probes();
  void end_all(const Status& status);

  void announce();
  bool look_at_notices();
  bool look_at_refusals();
  void look_at_overtaking(Nanoseconds now);
  void tell_refused(transport::Numbers numbers, const std::string& why);
  void drop_leader(int peer, const transport::Refusals& refusals);
  bool look_at_links(bool moved);
  void look_at_deadlines(Nanoseconds now);
  bool awaits(int peer) const;

  void disagree(std::uint64_t sequence);
  void resolve_disagreement(Nanoseconds now);
  bool inquires() const { return account_.inquiry != Inquiry::kNone; }
  void tell();
  void inquire(Inquiry why, Nanoseconds now, std::vector<Account::Awaited> awaited);
  void answer();
  void resolve_inquiry(Nanoseconds now);
  void conclude(int due, const std::vector<Account>& accounts, Overdue overdue);
  std::vector<Account::Awaited> awaited() const;
  std::vector<Account::Awaited> awaited_by(const Deadline& deadline,
                                           const Operation& operation) const;
  void hear_timeout(const transport::Notice& notice);
  void hear_loss(int peer, const transport::Notice& notice);
  void hear_refusal(int peer, const transport::Notice& notice);
  bool look_at_refusals_beside(const std::string& operation);
  std::vector<Standing> standings();
  LateMessage late_message(const Deadline& deadline) const;
  transport::Shape shape_now() const;
  // For texts: the collective that runs, or else an open message, with `peer` if there is one.
  std::string current_text(int peer) const;
  bool hear_beside(int peer, const transport::Notice& notice);
  void hear_mismatch(int peer, const transport::Notice& notice);
  void hear_apart(const transport::Notice& notice);
  bool look_at_order(const std::string& operation);
  void give_up(const Status& status, int culprit, const std::string& detail);
  void post(Code failure, int culprit, const std::string& detail);

  EngineOptions options_;
  std::vector<transport::Link*> links_;  // by peer; nullptr for this rank
  std::vector<std::string_view> media_;  // by peer
  FromAny from_any_;
  std::vector<OpenProbe> probes_;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;  // by peer, made on first use
  std::vector<Turns> turns_;                         // by peer; never resized
  Ring<Running> running_;                            // one request, or some calls; in order
  Ring<Queued> queue_;                               // what waits for their end, in order
  Execution own_execution_;                          // of requests; calls bring theirs
  bool announced_ = false;
  Nanoseconds began_ = 0;
  std::vector<Deadline> message_deadlines_;
  std::uint64_t sequence_ = 0;            // of what runs first; of what ran last while nothing runs
  transport::Descriptor descriptor_;      // of operation sequence_
  std::atomic<std::uint64_t> called_{0};  // the sequence number of what was started last
  Parts parts_ = Parts::kNone;
  int calls_open_ = 0;
  std::uint64_t completed_ = 0;  // of what this rank has ended well last
  NumberSet dropped_;            // operations that some rank has refused
  // Those that this rank has, as far as peers may not have heard; the ranges that count come first.
  transport::Refusals refusals_;
  Nanoseconds overtaken_ends_ = 0;         // when it is judged why a peer has gone on; 0: none has
  std::uint64_t sweeps_ = 0;               // see ChannelSource
  std::string beside_;                     // what look_beside() looks for, while it does
  std::atomic<std::uint64_t> besides_{0};  // operations called beside the engine, or kUncounted
  std::uint64_t told_besides_ = 0;         // as peers have heard while this rank waited
  Nanoseconds apart_ends_ = 0;             // when it is judged who calls in another order; 0: never
  Status failure_;
  // What this rank has told since a deadline passed, its own or another's; nothing moves from then
  // on. Of its own also what is late.
  Account account_;
  Overdue overdue_;
  Nanoseconds inquiry_began_ = 0;
  std::uint64_t progress_ = 0;  // of what runs first, as of the last watch()
  Nanoseconds moved_at_ = 0;    // when it was another one
  std::uint64_t disputed_ = 0;  // operation about which ranks disagree; 0: none
  Nanoseconds dispute_ends_ = 0;
  Standing disputed_standing_;  // of this rank, as it told its peers
  bool closed_ = false;
  bool warned_ = false;  // some peer has failed, maybe in an operation that this rank has not begun
  std::atomic<bool> vacant_{true};
};

}  // namespace pycoll::runtime
