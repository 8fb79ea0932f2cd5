// Tagged messages between this rank and one peer: matching, and moving bytes through the message
// channel. Messages with equal tags are received in the order sent; other tags may overtake.
//
// A message is cut in segments of at most kSegmentBytesMax; each carries the message's number, its
// total length (in `agreement`) and its tag. A message that arrives before its receive was posted
// is kept here, in memory of its own, so that two ranks that send to each other never block each
// other.
//
// Receives from kAnyPeer wait in a list that all mailboxes of a rank share. Of two receives that
// would take the same message the one that was posted first gets it.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/operation.h"
#include "runtime/request.h"
#include "transport/shm_arena.h"
#include "transport/transport.h"

namespace pycoll::runtime {

// A receive that no message has come for yet.
struct OpenRecv {
  MessageRequest request;
  std::shared_ptr<Operation> operation;
  std::uint64_t order = 0;  // among all receives of this rank
};

// A rank's receives from kAnyPeer.
struct FromAny {
  std::list<OpenRecv> recvs;
  std::uint64_t posted = 0;  // receives of this rank so far, whomever they are from
};

// One thread at a time.
class Mailbox {
 public:
  // `from_any` is this rank's and outlives the mailbox; nullptr: there never is such a receive.
  explicit Mailbox(int peer, FromAny* from_any = nullptr) : peer_(peer), from_any_(from_any) {}

  // A send to this rank itself: copied and finished at once.
  void send_to_self(const MessageRequest& request, Operation& operation);
  void post_send(const MessageRequest& request, std::shared_ptr<Operation> operation);
  // Whether a message with this tag has come, in part at least, that nobody has asked for.
  bool holds(std::uint32_t tag) const;
  // The earliest such message, of one tag or of kAnyTag.
  std::optional<Probed> probe(std::uint32_t tag) const;
  // Finished at once if the message is already here. A receive from kAnyPeer may be posted where
  // the mailbox holds its message.
  void post_recv(const MessageRequest& request, std::shared_ptr<Operation> operation);

  // Moves what can be moved; true if anything did. After a segment that cannot be, which only a
  // broken peer sends, broken() is true and nothing more is received.
  bool advance_sends(transport::SendChannel& channel);
  bool advance_recvs(transport::RecvChannel& channel);
  bool broken() const { return broken_; }

  int peer() const { return peer_; }
  bool sending() const { return !sends_.empty(); }
  // A receive is open: not matched yet, or its message is still on its way in.
  bool receiving() const {
    return !recvs_.empty() || (arriving_ && arrivals_.back().claim != nullptr);
  }

  // Whether part of the message that `operation` receives has come.
  bool brings(const Operation& operation) const;
  // Tags of whole messages that nobody has asked for, ascending.
  std::vector<std::uint32_t> unreceived_tags() const;

  // Finishes everything that is still open with `status`.
  void fail(const Status& status);

 private:
  struct Send {
    MessageRequest request;
    std::shared_ptr<Operation> operation;
    std::uint64_t sent = 0;
    bool all_accepted = false;
    transport::shm::Hold held;  // some media read it where it is
  };
  // A message on its way in, or complete and unclaimed.
  struct Arrival {
    std::uint64_t number = 0;
    std::uint32_t tag = 0;
    std::uint64_t total = 0;
    std::uint64_t received = 0;
    std::unique_ptr<OpenRecv> claim;  // where it goes; nullptr while nobody asked for it
    std::vector<std::byte> kept;      // its bytes while unclaimed
  };

  std::unique_ptr<OpenRecv> claim(std::uint32_t tag);
  bool continues(const transport::SegmentHeader& header) const;
  void accept(const transport::Segment& segment);
  void finish(Arrival& arrival);

  int peer_;
  FromAny* from_any_;
  std::uint64_t sent_count_ = 0;
  std::uint64_t received_count_ = 0;  // messages whose first segment has come
  std::deque<Send> sends_;
  std::list<OpenRecv> recvs_;
  std::list<Arrival> arrivals_;  // the last one may be incomplete, all before it are whole
  bool arriving_ = false;
  bool broken_ = false;
};

}  // namespace pycoll::runtime
