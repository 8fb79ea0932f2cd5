// The slow path of a rank that waits: what it learns about its peers, and its conclusions. It reads
// the operations and the notices, and fails the communicator through its report.
#pragma once

#include <string>

#include "base/clock.h"
#include "engine/diagnosis/deadline_inquiry.h"
#include "engine/diagnosis/disagreement.h"
#include "engine/diagnosis/refusal_exchange.h"
#include "engine/diagnosis/report.h"
#include "engine/diagnosis/stream_order.h"
#include "engine/operations/rank_operations.h"

namespace pycoll::engine {

// After each function, the caller ends all operations if report().is_over(). One thread at a time.
class Diagnosis {
 public:
  // `operations` outlives it.
  explicit Diagnosis(RankOperations& operations)
      : operations_(operations),
        report_(operations),
        disagreement_(operations, report_),
        inquiry_(operations, report_),
        refusals_(operations, report_),
        order_(operations, report_) {}

  Report& report() { return report_; }
  const Report& report() const { return report_; }
  RefusalExchange& refusals() { return refusals_; }
  StreamOrder& stream_order() { return order_; }

  // Draws the conclusion from an event of a step of the collectives; true if anything changed.
  bool conclude(Collectives::Event event);
  // Fails because `peer` has sent a malformed message.
  void fail_broken(int peer);
  // Fails because this rank was interrupted; peers lose it, and hear `why`.
  void interrupt(const std::string& why);
  // Looks at everything, after a poll and a step; `moved`: these moved anything. True if that or
  // anything else changed.
  bool look(bool moved);
  // For an operation on the device stream that has waited for a while: checks whether a peer has
  // failed or died, has closed (unless `patient`), has refused its arguments, or is in a collective
  // that this rank will only call after `operation`.
  void look_on_stream(const std::string& operation, bool patient);

 private:
  void follow_oldest(Nanoseconds now);
  bool look_at_notices();
  void look_at_state(const transport::Notice& notice);
  void look_at_overtaking(Nanoseconds now);
  bool look_at_links(bool moved);
  bool awaits(int peer) const;
  void hear_loss(int peer, const transport::Notice& notice);

  RankOperations& operations_;
  Report report_;
  Disagreement disagreement_;
  DeadlineInquiry inquiry_;
  RefusalExchange refusals_;
  StreamOrder order_;
  Nanoseconds overtaken_ends_ = 0;  // when a peer that is ahead starts a dispute; 0: none is ahead
};

}  // namespace pycoll::engine
