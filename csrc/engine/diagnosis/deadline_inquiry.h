// Deadlines, and how ranks find the rank at fault. A rank whose deadline has passed asks all others
// in its notice where they are and which ranks they wait for. A rank that is inside pycoll answers
// in its own notice; from then on no operation moves. The lowest rank whose deadline has passed
// judges when all have answered, or at the end of a grace period. The other ranks report its
// verdict.
#pragma once

#include <vector>

#include "base/clock.h"
#include "engine/diagnosis/report.h"
#include "engine/operations/rank_operations.h"

namespace pycoll::engine {

// One thread at a time.
class DeadlineInquiry {
 public:
  // Both outlive it.
  DeadlineInquiry(RankOperations& operations, Report& report)
      : operations_(operations), report_(report) {}

  // Opens the inquiry if a deadline of this rank has passed.
  void look(Nanoseconds now);
  // Gives this rank's account of what it waits for, after another rank's deadline has passed.
  void answer();
  // Fails the communicator with the verdict, if it is due. Requires: the inquiry is open.
  void resolve(Nanoseconds now);
  // Fails with the verdict of the rank whose deadline has passed.
  void hear(const transport::Notice& notice);

 private:
  void open(Inquiry why, Nanoseconds now, std::vector<PeerWait> waits);
  std::vector<PeerWait> waits() const;
  // Fails the communicator with the verdict on the deadline of rank `due`: which rank stands still.
  void conclude(int due, const std::vector<Account>& accounts, Overdue overdue);

  RankOperations& operations_;
  Report& report_;
  Nanoseconds began_ = 0;
};

}  // namespace pycoll::engine
