// The collectives of a rank: those that run, oldest first, and those that wait for them.
//
// Collectives run in the order started and end in that order. Consecutive calls may be in progress
// at the same time if none touches memory that another one writes. Each channel serves them one
// after the other (ChannelTicket), so an earlier call runs as if it were alone. One thread at a
// time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cache.h"
#include "base/clock.h"
#include "base/status.h"
#include "engine/operations/call.h"
#include "engine/operations/call_numbers.h"
#include "engine/operations/operation.h"
#include "engine/operations/peers.h"
#include "engine/operations/ring.h"
#include "executor/execution.h"
#include "executor/request.h"

namespace pycoll::engine {

using executor::ChannelSource;
using executor::ChannelTicket;
using executor::Progress;

class Collectives final : private ChannelSource {
 public:
  // Both outlive this object.
  Collectives(Peers& peers, CallNumbers& numbers);
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // As Engine::start(). An invalid request ends with kInvalidArgument; take_refused() then gives
  // its reason.
  std::shared_ptr<Operation> start(CollectiveRequest request, Nanoseconds timeout);
  void start(std::shared_ptr<Call> call, const std::byte* input, std::byte* output,
             std::shared_ptr<Operation> operation, Nanoseconds timeout);
  // Runs a call of a communicator of one rank from beginning to end. Requires: the communicator has
  // one rank, and idle().
  Status run_alone(Call& call, const std::byte* input, std::byte* output);

  enum class Event : std::uint8_t {
    kNone,
    kRefused,   // see take_refused()
    kDisagree,  // the oldest collective found a segment of another operation
    kSpoiled,   // the user's reduction failed in it
    kGivenUp,   // the oldest is done here, but a peer failed before it ended it
  };
  struct Step {
    bool moved = false;
    Event event = Event::kNone;
  };
  // Does a bounded piece of work. Without `all`, each collective is advanced once when it is new.
  // Later calls advance it again only if an older one moves, and the oldest one only while
  // Call::kRunsMax collectives run.
  Step step(bool all);
  // Begins queued collectives that may run now, until one is refused.
  void begin_next();
  // The collective that was refused because its request is invalid. take_refused() returns it once.
  struct Refused {
    std::uint64_t sequence = 0;
    std::string why;
  };
  bool has_refused() const { return refused_.has_value(); }
  std::optional<Refused> take_refused() { return std::exchange(refused_, std::nullopt); }

  // Operations of these numbers have ended on all ranks because one of them has refused them.
  void ignore(Numbers numbers) { dropped_.add(numbers); }
  // Whether the oldest collective can end here although other ranks go on.
  bool may_drop_oldest() const;
  // Ends the oldest collective with `status`. Requires: may_drop_oldest().
  void drop_oldest(const Status& status);
  // From now on no collective advances, and none begins while another one runs. If collective
  // `sequence` runs behind an older one, sequence() and descriptor() are those of it from now on.
  void hold(std::uint64_t sequence);
  // Ends all running and queued collectives with `status`, and all later ones with `failure`.
  void end(const Status& status, const Status& failure);

  // Whether none runs or waits.
  bool idle() const { return running_.empty(); }
  // Whether none runs or waits, and end() was not called. Any thread.
  bool vacant() const { return vacant_.load(std::memory_order_acquire); }
  // Whether the oldest one is a short call.
  bool runs_short() const { return runs_call() && running_.front().pending.call->is_short(); }
  bool are_short() const;
  // True until the newest running collective is advanced for the first time; false if none runs.
  bool has_newcomer() const { return !running_.empty() && !running_[running_.size() - 1].asked; }

  // The oldest running collective, or nullptr; its timeout; and this rank's wait in it.
  const Execution* oldest() const {
    return running_.empty() ? nullptr : running_.front().execution;
  }
  Nanoseconds timeout() const { return running_.front().pending.timeout; }
  struct Wait {
    Nanoseconds began = 0;  // when this rank first had to wait; 0: not yet
    Nanoseconds deadline = 0;
    Nanoseconds moved_at = 0;    // when `progress` changed last
    std::uint64_t progress = 0;  // Execution::progress(), as last read
    bool announced = false;      // peers were told of it
  };
  Wait& wait() { return wait_; }
  // Number and description of the oldest running collective, or of the last one that ran.
  std::uint64_t sequence() const { return sequence_; }
  const transport::Descriptor& descriptor() const { return descriptor_; }
  // The number of the last one that ended well.
  std::uint64_t completed() const { return completed_; }
  // The arrays of collective `sequence`, if it runs; else nullptr.
  const executor::CallArrays* arrays_of(std::uint64_t sequence) const;

 private:
  // A collective that runs or is queued.
  struct Pending {
    std::shared_ptr<Call> call;  // nullptr: a request describes the collective
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
    std::shared_ptr<Operation> operation;
    Nanoseconds timeout = 0;
    std::uint64_t sequence = 0;
  };
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

  transport::SendChannel& send_channel(int peer, std::uint32_t number) override {
    return peers_.send_channel(peer, number);
  }
  transport::RecvChannel& recv_channel(int peer, std::uint32_t number) override {
    return peers_.recv_channel(peer, number);
  }
  ChannelTicket& send_ticket(int peer, std::uint32_t number) override {
    return tickets_[static_cast<std::size_t>(peer)].send[number];
  }
  ChannelTicket& recv_ticket(int peer, std::uint32_t number) override {
    return tickets_[static_cast<std::size_t>(peer)].recv[number];
  }
  std::uint64_t& traversals() override { return traversals_; }
  std::size_t uncached_bytes() const override {
    return pycoll::uncached_bytes(static_cast<std::size_t>(peers_.size()));
  }
  bool is_dropped(std::uint64_t sequence) const override { return dropped_.contains(sequence); }

  bool runs_call() const { return !running_.empty() && running_.front().pending.call != nullptr; }
  Status fits(const CollectiveRequest& request) const;
  bool may_begin(const Pending& pending) const;
  // `pending.operation` ends with the error if the collective cannot begin.
  void begin(Pending&& pending, CollectiveRequest* request);
  Status enter(Running& entering, CollectiveRequest* request);
  Status bind(Call& call, Call::Run& run, const std::byte* input, std::byte* output);
  void select_oldest();
  Step end_oldest(bool moved);
  // Updates vacant(). Call it after every change of running_, queue_ or failure_.
  void note_vacancy() {
    const bool vacant = running_.empty() && queue_.empty() && failure_.ok();
    vacant_.store(vacant, std::memory_order_release);  // pairs with the load in vacant()
  }

  Peers& peers_;
  CallNumbers& numbers_;
  std::vector<ChannelTickets> tickets_;  // by peer; never resized
  Ring<Running> running_;                // one request, or several calls; oldest first
  Ring<Queued> queue_;                   // collectives that wait for the running ones; oldest first
  Execution own_execution_;              // runs requests; calls have executions of their own
  bool held_ = false;
  Wait wait_;
  std::uint64_t sequence_ = 0;
  transport::Descriptor descriptor_;
  std::uint64_t completed_ = 0;
  std::uint64_t traversals_ = 0;  // see ChannelSource
  NumberSet dropped_;
  std::optional<Refused> refused_;
  Status failure_;  // after end()
  std::atomic<bool> vacant_{true};
};

}  // namespace pycoll::engine
