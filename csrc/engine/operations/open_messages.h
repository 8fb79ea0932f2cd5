// The messages of a rank to and from all its peers, and its probes. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "engine/operations/late_message.h"
#include "engine/operations/mailbox.h"
#include "engine/operations/operation.h"
#include "engine/operations/peers.h"
#include "executor/request.h"

namespace pycoll::engine {

using executor::ProbeRequest;

// An open message.
struct OpenMessage {
  std::shared_ptr<Operation> operation;
  LateMessage::Kind kind = LateMessage::Kind::kRecv;
  int peer = 0;  // or kAnyPeer
  std::uint32_t tag = 0;
  Nanoseconds timeout = 0;
  Nanoseconds deadline = 0;
  bool is_long = false;  // the caller's memory has more than Call::kShortBytes
};

class OpenMessages {
 public:
  // `peers` outlives it.
  explicit OpenMessages(Peers& peers);
  OpenMessages(const OpenMessages&) = delete;
  OpenMessages& operator=(const OpenMessages&) = delete;

  // Starts a message; its timeout counts from now. `operation`, if given, is not done yet;
  // otherwise a new one is made. Returns it.
  std::shared_ptr<Operation> start(const MessageRequest& request, Nanoseconds timeout,
                                   std::shared_ptr<Operation> operation);
  // Ends when a matching message has arrived, or at end(); a probe has no deadline.
  std::shared_ptr<Operation> start(const ProbeRequest& request);
  // Removes a probe that its caller has given up.
  void forget(const Operation& probe);

  struct Step {
    bool moved = false;
    int broken = -1;  // a peer that has sent a malformed message
  };
  // Does a bounded piece of work.
  Step step();
  // From now on nothing moves.
  void hold() { held_ = true; }
  // Ends all messages and probes with `status`, and all later ones with `failure`.
  void end(const Status& status, const Status& failure);

  // Whether a message or a probe is open that waits for a peer.
  bool active() const;
  // Whether all open messages, and all messages that arrive without a receive, are short.
  bool are_short() const { return long_messages_ == 0 && !long_arrives_; }

  // An open message whose deadline has passed, or nullptr.
  const OpenMessage* late(Nanoseconds now) const;
  LateMessage describe(const OpenMessage& message) const;
  // The ranks for which this message waits, and those for which any open message or probe waits.
  std::vector<PeerWait> waits_of(const OpenMessage& message) const;
  std::vector<PeerWait> waits() const;
  // Whether an open message or probe cannot end without `peer`.
  bool waits_for(int peer) const;
  // Whether the channel from this peer holds segments that the next step() would take.
  bool has_more_of(int peer) const;
  // The name of an open message, with `peer` if there is one; empty if none is open.
  std::string name(int peer) const;

 private:
  struct OpenProbe {
    ProbeRequest request;
    std::shared_ptr<Operation> operation;
  };

  Mailbox& mailbox_of(int peer);
  const Mailbox* used_mailbox(int peer) const {
    return mailboxes_[static_cast<std::size_t>(peer)].get();
  }
  void send_at_once(const MessageRequest& request, const std::shared_ptr<Operation>& operation);
  void receive_from_any(const MessageRequest& request, std::shared_ptr<Operation> operation);
  void drop_ended();
  void answer_probes();

  Peers& peers_;
  FromAny from_any_;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;  // by peer, made on first use
  std::vector<OpenMessage> open_;
  std::vector<OpenProbe> probes_;
  std::size_t long_messages_ = 0;  // open messages that are long
  bool long_arrives_ = false;      // a long message was arriving at the last step()
  bool held_ = false;
  Status failure_;  // after end()
};

}  // namespace pycoll::engine
