// Tagged messages between this rank and one peer: matching, and moving bytes through the message
// channel. Messages with equal tags are received in the order sent. Messages with other tags may
// overtake them.
//
// A message is cut into segments of at most kSegmentBytesMax bytes. Each carries the message's
// number, its total length in bytes (in `agreement`) and its tag. A message without a receive stays
// in the channel, unless the rank sends, probes, or waits for a message behind it. The mailbox then
// keeps it in memory of its own, so two ranks that send to each other never block each other.
//
// Receives from kAnyPeer wait in a list that all mailboxes of a rank share. If two receives match
// the same message, the one that was posted first gets it.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "engine/operations/operation.h"
#include "executor/request.h"
#include "shared_memory/shm_arena.h"
#include "transport/transport.h"

namespace pycoll::engine {

using executor::kAnyPeer;
using executor::kAnyTag;
using executor::kTagMax;
using executor::MessageRequest;
using executor::Probed;

// A receive that has not matched a message yet.
struct OpenRecv {
  MessageRequest request;
  std::shared_ptr<Operation> operation;
  std::uint64_t order = 0;  // among all receives of this rank
};

// The receives of a rank from kAnyPeer.
struct FromAny {
  std::deque<OpenRecv> recvs;
  std::uint64_t posted = 0;  // receives of this rank so far, from any source
};

// One thread at a time.
class Mailbox {
 public:
  // `from_any` belongs to this rank and outlives the mailbox; nullptr: no receive is from kAnyPeer.
  explicit Mailbox(int peer, FromAny* from_any = nullptr) : peer_(peer), from_any_(from_any) {}

  // A send to this rank itself: the message is copied and the operation finished at once.
  void send_to_self(const MessageRequest& request, Operation& operation);
  void post_send(const MessageRequest& request, std::shared_ptr<Operation> operation);
  // Whether an unclaimed message with this tag has arrived, at least in part.
  bool holds(std::uint32_t tag) const;
  // The earliest unclaimed message with this tag, or with any tag for kAnyTag.
  std::optional<Probed> probe(std::uint32_t tag) const;
  // The operation finishes at once if the message is already here. A receive from kAnyPeer may be
  // posted only if this mailbox holds a matching message.
  void post_recv(const MessageRequest& request, std::shared_ptr<Operation> operation);

  // Sends segments until the channel is full, at most kSegmentsPerAdvance; true if anything moved.
  bool advance_sends(transport::SendChannel& channel);
  // Takes up to kSegmentsPerAdvance segments while receives are open; true if it took any. With
  // `takes_unclaimed` and no open receive it takes one segment; the caller then checks whether its
  // wait has ended. Only a broken peer sends an invalid segment: then is_broken() is true and
  // nothing more is received.
  bool advance_recvs(transport::RecvChannel& channel, bool takes_unclaimed);
  bool is_broken() const { return broken_; }

  int peer() const { return peer_; }
  bool sending() const { return !sends_.empty(); }
  // Whether a receive is open: not matched yet, or its message is still arriving.
  bool receiving() const {
    return !recvs_.empty() || (arriving_ && arrivals_.back().claim.has_value());
  }

  // Length in bytes of the message that is arriving; 0 if there is none.
  std::uint64_t arriving() const { return arriving_ ? arrivals_.back().total : 0; }

  // Whether a part of the message that `operation` receives has arrived.
  bool brings(const Operation& operation) const;
  // Tags of complete unclaimed messages, ascending.
  std::vector<std::uint32_t> unreceived_tags() const;

  // Finishes all open sends and receives with `status`.
  void fail(const Status& status);

 private:
  struct Send {
    MessageRequest request;
    std::shared_ptr<Operation> operation;
    std::uint64_t sent = 0;
    bool all_accepted = false;
    transport::shm::Hold held;  // some media read the memory in place
  };
  // A long message moves in several steps, between which callers look at other events.
  static constexpr int kSegmentsPerAdvance = 2 * transport::kChannelDepth;

  // A message that is arriving, or is complete and unclaimed.
  struct Arrival {
    std::uint64_t number = 0;
    std::uint32_t tag = 0;
    std::uint64_t total = 0;
    std::uint64_t received = 0;
    bool is_huge = false;           // longer than the caches hold, so copies bypass them
    std::optional<OpenRecv> claim;  // the receive that gets it; empty while unclaimed
    std::vector<std::byte> kept;    // its bytes while unclaimed
  };

  std::optional<OpenRecv> claim(std::uint32_t tag);
  bool continues(const transport::SegmentHeader& header) const;
  void accept(const transport::Segment& segment);
  static void add(Arrival& arrival, const transport::Segment& segment);
  void finish(const OpenRecv& recv, const Arrival& arrival) const;

  int peer_;
  FromAny* from_any_;
  std::uint64_t sent_count_ = 0;
  std::uint64_t received_count_ = 0;  // messages whose first segment has arrived
  std::deque<Send> sends_;
  std::deque<OpenRecv> recvs_;
  std::list<Arrival> arrivals_;  // only the last one may be incomplete
  bool arriving_ = false;
  bool broken_ = false;
};

}  // namespace pycoll::engine
