// The notices of a link in both directions. Each place in the peer's memory holds one notice, so a
// notice is written there only after the peer has read the one before. A failure has a place of its
// own and is final.
//
// Threads: those of the Transport.
#pragma once

#include <cstdint>

#include "transport/verbs/verbs_rail.h"

namespace pycoll::transport::verbs {

class Notices {
 public:
  // Makes `notice` the next one to send. Returns false if a failure came before, which is final.
  bool set(const Notice& notice);
  // Makes the next one a closing notice, unless a failure came before.
  void close();
  // Whether the next notice, or the last one, is the failure of this rank.
  bool is_final() const { return outgoing_.failure != 0; }
  // Whether the peer leaves space for a notice that waits.
  bool is_due() const { return waits_ && (is_final() || !unread_); }
  // Whether that notice can be sent over `rail`, too.
  bool can_send(const Rail& rail) const { return is_due() && (is_final() || rail.done(free_at_)); }
  // Sends the next notice. Requires: the queue of `rail` has space, and can_send() or is_final().
  void send(Rail& rail);

  // Takes over a notice that has arrived over `rail`. A failure that came before stays.
  void accept(const Rail& rail, NoticePlace place);
  // The newest notice of the peer, and how many have arrived.
  const Notice& newest() const { return newest_; }
  std::uint64_t count() const { return count_; }

  // The peer has read the previous notice.
  void note_read() { unread_ = false; }
  // Whether the peer has to learn that its notice was read.
  bool owes_receipt() const { return receipt_due_; }
  void send_receipt(Rail& rail);

  // Drops the notices that have not been sent.
  void drop() { waits_ = receipt_due_ = false; }

 private:
  Notice newest_;
  std::uint64_t count_ = 0;
  Notice outgoing_;
  bool waits_ = false;   // outgoing_ was not sent yet
  bool unread_ = false;  // the peer has not read the previous notice
  std::uint64_t free_at_ = 0;
  bool receipt_due_ = false;
};

}  // namespace pycoll::transport::verbs
