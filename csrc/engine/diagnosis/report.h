// The notices of this rank to its peers: its state and its findings, and at last the reason of its
// failure.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"
#include "engine/diagnosis/guilty.h"
#include "engine/operations/rank_operations.h"
#include "transport/transport.h"

namespace pycoll::engine {

// The parts of the notice that belong to the objects of the diagnosis. Each sets its own, and calls
// Report::tell().
struct Findings {
  // This rank's answer since a deadline has passed, its own or another rank's. From then on no
  // operation moves. If the deadline was its own, `overdue` holds what is late.
  Account account;
  Overdue overdue;
  transport::Dispute dispute;  // operation 0: ranks do not disagree
  // This rank's standing when the dispute began; the array is added while ranks compare. Notices
  // repeat it until the dispute ends, whatever this rank starts later.
  Standing disputed;
  // Operations that this rank has refused, as long as peers may not have heard of them.
  transport::Refusals refusals;
  // The operation on the device stream in which this rank waits, while it looks at its peers.
  std::string on_stream;

  bool disputes() const { return dispute.operation != 0; }
  bool inquires() const { return account.inquiry != Inquiry::kNone; }
};

class Report {
 public:
  // `operations` outlives it.
  explicit Report(RankOperations& operations) : operations_(operations) {}

  Findings& findings() { return findings_; }
  // Posts the state of this rank and its findings.
  void tell();
  // As tell(), and notes that peers were told of the oldest collective.
  void announce();
  // Fails the communicator: sets failure(), and posts a notice that makes the peers do the same.
  // `culprit` -1: no rank. `at`: the operation that the notice names, if it is not that of this
  // rank. Call it once.
  void give_up(const Status& status, int culprit, const std::string& detail,
               const std::optional<Standing>& at = std::nullopt);
  // Sets failure() without a notice, unless there was a failure before.
  void close();

  // Whether the communicator has failed or was closed.
  bool is_over() const { return !failure_.ok(); }
  // How operations end that were open then, and how later ones end.
  const Status& verdict() const { return verdict_; }
  const Status& failure() const { return failure_; }

  // For error texts: the operation on the device stream, the running collective, or else an open
  // message, with `peer` if there is one.
  std::string name_current(int peer) const;

 private:
  transport::Notice make_notice(const std::string& detail) const;

  RankOperations& operations_;
  Findings findings_;
  Status verdict_;
  Status failure_;
};

}  // namespace pycoll::engine
