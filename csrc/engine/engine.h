// The operations of one rank in one communicator: their order, their channels, and how they end.
//
// The engine never blocks and never sleeps. step() is the fast path: it advances the
// active operations. watch() is the slow path of a rank that waits: it polls the media,
// posts this rank's notice and reads the notices of its peers. It turns a dead peer, a
// disagreement or a passed deadline into the failure of the communicator. A failure is
// final: every open and every later operation ends with it.
//
// Collectives run in the order started and end in that order; messages run concurrently with them.
// Consecutive calls may be in progress at the same time if none touches memory that another one
// writes. Each channel serves them one after the other (ChannelTicket), so an earlier call runs as
// if it were alone. Notices, deadlines, disagreement and loss concern the first call only; each
// later call is checked when it becomes the first.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/cache.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/call.h"
#include "engine/diagnosis/verdict.h"
#include "engine/mailbox.h"
#include "engine/numbers.h"
#include "engine/operation.h"
#include "engine/ring.h"
#include "executor/execution.h"
#include "executor/request.h"
#include "transport/capabilities.h"

namespace pycoll::engine {

using executor::ChannelSource;
using executor::ChannelTicket;
using executor::ProbeRequest;
using executor::Progress;

struct EngineOptions {
  int rank = 0;
  int size = 1;
  // Each peer uses the first transport that has a link to it.
  std::vector<std::shared_ptr<transport::Transport>> transports;
  std::vector<std::string> names;  // names[r]: "host:pid", for error texts
  std::shared_ptr<Clock> clock;
  // Cores on which all ranks of this host together may run; 0: the cores of the calling thread.
  int cores = 0;
  // Whether ranks that outnumber those cores move themselves to cores with fewer ranks.
  bool cpu_balancing = true;
};

// One thread at a time (the communicator's lock, or a test that steps many engines).
class Engine final : public ChannelSource {
 public:
  // kInvalidArgument names a peer that no transport reaches.
  static Status create(EngineOptions options, std::unique_ptr<Engine>* engine);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Enters a collective. An invalid request ends with kInvalidArgument, naming this rank, and is
  // refused as by refuse(). If other collectives run, the request is checked when they have ended.
  // The timeout of a message counts from now. The timeout of a collective counts from its first
  // wait as the oldest running collective. kForever: no timeout.
  std::shared_ptr<Operation> start(CollectiveRequest request, Nanoseconds timeout);
  std::shared_ptr<Operation> start(const MessageRequest& request, Nanoseconds timeout);
  // Starts a message with an operation that the caller made and that is not done yet.
  void start(const MessageRequest& request, std::shared_ptr<Operation> operation,
             Nanoseconds timeout);
  // Ends when a matching message has arrived, or when
  // the communicator fails; a probe has no deadline.
  std::shared_ptr<Operation> start(const ProbeRequest& request);
  // Removes a probe whose result is no longer wanted.
  void forget_probe(const Operation& operation);
  // Starts a call. `input` and `output` have the lengths of the call's request. If other
  // collectives run, the call waits or runs concurrently. It allocates nothing, and binds only in
  // its first few runs. The caller may own `operation` if it outlives the run.
  void start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             std::shared_ptr<Operation> operation, Nanoseconds timeout);
  // Refuses the collective that this rank would start now, for the reason `why`. The
  // refusal counts as started, so the sequence numbers of ranks stay equal. On peers the
  // collective ends with kInvalidArgument, naming this rank, once they wait in it; the
  // communicator continues. If peers may still access memory of a rank in place, the
  // communicator fails instead, on all ranks, with that error.
  void refuse(const std::string& why);
  // Changes whenever an operation is started or refused, in
  // the engine or on the device stream; any thread.
  std::uint64_t calls() const {
    const std::uint64_t on_streams = on_streams_.load(std::memory_order_relaxed);
    return called_.load(std::memory_order_relaxed) + (on_streams == kUncounted ? 0 : on_streams);
  }
  // Collectives that start until end_call() are parts of one call. A peer that refuses one part
  // takes no part in the later ones. A nested call is a part of the outer one.
  void begin_call() {
    if (calls_open_++ == 0) parts_ = Parts::kFirst;
  }
  void end_call() {
    if (--calls_open_ == 0) parts_ = Parts::kNone;
  }

  // Runs a call of a communicator of one rank from
  // beginning to end. Requires: size() is 1 and idle().
  Status run_alone(Call& call, const std::byte* input, std::byte* output);
  // Whether no collective runs or waits.
  bool idle() const { return running_.empty(); }
  // Whether the engine is idle and has not failed; any thread, as of the last change.
  bool vacant() const { return vacant_.load(std::memory_order_acquire); }
  // Whether the oldest running collective is a short call.
  bool runs_short() const { return runs_call() && running_.front().pending.call->is_short(); }
  // Whether everything in progress is short: all running collectives, all open messages, and the
  // messages that arrive without a receive.
  bool is_brief() const;

  // Does a bounded piece of work; true if anything moved. Returns
  // when a collective ends, even if more could move.
  bool step();
  // Advances collectives for a caller that has just started one and does not wait for it. Each is
  // advanced once when it is new. Later calls advance it again only if an older one moves, and the
  // oldest one only while Call::kRunsMax collectives run. One call then handles several arrived
  // segments. Messages do not move.
  bool step_started();
  // The part of step() that concerns messages.
  bool step_messages();
  // True until the newest running collective is advanced for the first time; false if none runs.
  bool has_newcomer() const { return !running_.empty() && !running_[running_.size() - 1].asked; }
  bool watch();  // true if anything moved or changed
  bool poll();   // moves bytes on all media; true if any moved
  // Polls the media on which bytes show only after a poll; true if any moved. With `all` it polls
  // all media, which also refreshes the states of links.
  bool move_bytes(bool all);
  bool active() const;
  // Whether the reason of a failure has not been sent to some peer yet, because its channel is
  // full; watch() keeps sending it.
  bool owes_reason() const;

  // Counts an operation on the device stream. All ranks call collectives and these operations in
  // the same order. `replayable`: the operation may run again without a call, so from now on counts
  // are not compared. Any thread.
  void count_on_stream(bool replayable);
  // For operations on the device stream that have waited for a while. Checks whether a
  // peer has failed or died, has closed (unless `patient`), or is in a collective that
  // this rank will only call after `operation`. If so, the communicator fails with the
  // error that watch() would give; failure() returns it.
  void look_on_stream(const std::string& operation, bool patient);
  // Reports that an operation on the device stream has failed after `after` seconds. The
  // communicator fails with its code, here and on peers.
  void fail_on_stream(const Status& status, const std::string& operation, double after);

  // Fails the communicator with kInterrupted here, and on peers
  // with kPeerLost, which names this rank and `why`.
  void interrupt(const std::string& why);
  // Closes in good order: open operations end with
  // kClosed, and peers see the link closed. Idempotent.
  void close();

  const Status& failure() const { return failure_; }
  bool is_closed() const { return closed_; }
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
  ChannelTicket& send_ticket(int peer, std::uint32_t number) override;
  ChannelTicket& recv_ticket(int peer, std::uint32_t number) override;
  std::uint64_t& traversals() override { return traversals_; }
  std::size_t uncached_bytes() const override {
    return pycoll::uncached_bytes(static_cast<std::size_t>(size()));
  }
  bool is_dropped(std::uint64_t sequence) const override { return dropped_.contains(sequence); }

 private:
  // A collective that runs or is queued.
  struct Pending {
    std::shared_ptr<Call> call;  // nullptr: `request` describes the collective
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
    bool* busy = nullptr;  // points into the run of the call; nullptr for a request
    bool over = false;     // its rows have run; it ends after all older ones
    bool asked = false;    // it has been advanced at least once
  };
  struct ChannelTickets {
    std::array<ChannelTicket, transport::kChannelsMax> send;
    std::array<ChannelTicket, transport::kChannelsMax> recv;
  };
  // An open message.
  struct Deadline {
    std::shared_ptr<Operation> operation;
    LateMessage::Kind kind = LateMessage::Kind::kRecv;
    int peer = 0;
    std::uint32_t tag = 0;
    Nanoseconds timeout = 0;
    Nanoseconds at = 0;
    bool is_long = false;  // the caller's memory has more than Call::kShortBytes
  };

  struct OpenProbe {
    ProbeRequest request;
    std::shared_ptr<Operation> operation;
  };

  explicit Engine(EngineOptions options);
  std::uint64_t next_sequence();
  void begin_next();
  // Updates vacant(). Call it after every change of running_, queue_ or failure_.
  void note_vacancy() {
    const bool vacant = running_.empty() && queue_.empty() && failure_.ok();
    vacant_.store(vacant, std::memory_order_release);  // pairs with the load in vacant()
  }
  Status fits(const CollectiveRequest& request) const;
  bool may_begin(const Pending& pending) const;
  // `pending.operation` ends with the error if the collective cannot begin.
  void begin(Pending&& pending, CollectiveRequest* request);
  Status enter(Running& entering, CollectiveRequest* request);
  Status bind(Call& call, Call::Run& run, const std::byte* input, std::byte* output);
  void select_oldest();
  bool step_collectives(bool all);
  bool runs_call() const { return !running_.empty() && running_.front().pending.call != nullptr; }
  bool end_oldest();
  bool is_given_up(std::uint64_t sequence);
  Mailbox& mailbox_of(int peer);
  void send_at_once(const MessageRequest& request, const std::shared_ptr<Operation>& operation);
  void receive_from_any(const MessageRequest& request, std::shared_ptr<Operation> operation);
  void drop_ended_messages();
  void answer_probes();
  void end_all(const Status& status);

  // Tells the peers the state of this rank, and notes that its oldest operation has been told.
  void announce();
  bool look_at_notices();
  bool look_at_refusals();
  void look_at_overtaking(Nanoseconds now);
  void tell_refused(transport::Numbers numbers, const std::string& why);
  void drop_oldest(int peer, const transport::Refusals& refusals);
  bool has_more_of(int peer);
  bool look_at_links(bool moved);
  void look_at_deadlines(Nanoseconds now);
  bool awaits(int peer);

  void disagree(std::uint64_t sequence);
  void resolve_disagreement(Nanoseconds now);
  std::uint64_t earliest_dispute();
  bool have_compared(std::uint64_t sequence);
  bool is_worth_comparing(std::uint64_t sequence);
  void enter(const transport::Dispute& round);
  bool disputes() const { return dispute_.operation != 0; }
  bool inquires() const { return account_.inquiry != Inquiry::kNone; }
  void tell();
  void inquire(Inquiry why, Nanoseconds now, std::vector<Account::Wait> waits);
  // Gives this rank's account of what it waits for, after another rank's deadline has passed.
  void answer();
  void resolve_inquiry(Nanoseconds now);
  // Fails the communicator with the verdict on the deadline of rank `due`: which rank stands still.
  void conclude(int due, const std::vector<Account>& accounts, Overdue overdue);
  std::vector<Account::Wait> waits() const;
  std::vector<Account::Wait> waited_by(const Deadline& deadline) const;
  void hear_timeout(const transport::Notice& notice);
  void hear_loss(int peer, const transport::Notice& notice);
  void hear_refusal(int peer, const transport::Notice& notice);
  bool look_at_refusals_on_stream(const std::string& operation);
  std::vector<Standing> standings();
  LateMessage late_message(const Deadline& deadline) const;
  const executor::CallArrays* arrays_of(std::uint64_t sequence) const;
  // For error texts: the running collective, else an open message, with `peer` if there is one.
  std::string current_text(int peer) const;
  bool hear_from_stream(int peer, const transport::Notice& notice);
  void hear_mismatch(int peer, const transport::Notice& notice);
  void hear_apart(const transport::Notice& notice);
  void hear_codes(int peer, const transport::Notice& notice);
  bool look_at_order(const std::string& operation);
  void give_up(const Status& status, int culprit, const std::string& detail);
  // Gives every link a notice of this rank: its state, and with `failure` why it gives up.
  void post(Code failure, int culprit, const std::string& detail);

  EngineOptions options_;
  std::vector<transport::Link*> links_;               // by peer; nullptr for this rank
  std::vector<transport::Transport*> moved_by_poll_;  // media that show nothing without poll()
  std::vector<transport::OutputQueue*> outputs_;
  std::vector<std::string_view> media_;  // by peer
  FromAny from_any_;
  std::vector<OpenProbe> probes_;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;  // by peer, made on first use
  std::vector<ChannelTickets> tickets_;              // by peer; never resized
  Ring<Running> running_;                            // one request, or several calls; oldest first
  Ring<Queued> queue_;       // collectives that wait for the running ones; oldest first
  Execution own_execution_;  // runs requests; calls have executions of their own
  bool announced_ = false;
  Nanoseconds began_ = 0;
  std::vector<Deadline> message_deadlines_;
  std::size_t long_messages_ = 0;  // open messages that are long
  bool long_arrives_ = false;      // a long message was arriving at the last step_messages()
  std::uint64_t sequence_ = 0;     // of the oldest running operation, or of the last one that ran
  transport::Descriptor descriptor_;      // of operation sequence_
  std::atomic<std::uint64_t> called_{0};  // sequence number of the operation that was started last
  Parts parts_ = Parts::kNone;
  int calls_open_ = 0;
  std::uint64_t completed_ = 0;  // number of the last operation that ended well on this rank
  NumberSet dropped_;            // operations that some rank has refused
  // Operations that this rank has refused, as long as peers may not have heard of them.
  transport::Refusals refusals_;
  Nanoseconds overtaken_ends_ = 0;  // when a peer that is ahead starts a dispute; 0: none is ahead
  std::uint64_t traversals_ = 0;    // see ChannelSource
  std::string on_stream_;           // the operation that look_on_stream() checks, while it does
  // Operations called on the device stream, or kUncounted.
  std::atomic<std::uint64_t> on_streams_{0};
  std::uint64_t told_streams_ = 0;  // the count in this rank's last notice
  // When a different order of calls fails the communicator, at the latest; 0: no order differs.
  Nanoseconds apart_ends_ = 0;
  Status failure_;
  // This rank's answer since a deadline has passed, its own or another rank's. From then on no
  // operation moves. If the deadline was its own, overdue_ holds what is late.
  Account account_;
  Overdue overdue_;
  Nanoseconds inquiry_began_ = 0;
  std::uint64_t progress_ = 0;  // of the oldest running operation, as of the last watch()
  Nanoseconds moved_at_ = 0;    // when progress_ changed last
  transport::Dispute dispute_;  // as this rank's notice tells
  bool comparing_ = false;      // the ranks of the dispute are known and search for the difference
  Nanoseconds dispute_ends_ = 0;
  // This rank's standing when the dispute began; the array is added while ranks compare. Notices
  // repeat it until the dispute ends, whatever this rank starts later.
  Standing disputed_standing_;
  bool closed_ = false;
  bool warned_ = false;  // a peer has failed, possibly in an operation that this rank has not begun
  std::atomic<bool> vacant_{true};
};

}  // namespace pycoll::engine
