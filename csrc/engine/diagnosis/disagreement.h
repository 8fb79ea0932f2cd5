// Disagreement of ranks about an operation: how they tell each other what they called, how they
// find the first array in which their calls differ, and the verdict. Nothing here runs while ranks
// agree.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "engine/diagnosis/report.h"
#include "engine/operations/rank_operations.h"

namespace pycoll::engine {

// One thread at a time.
class Disagreement {
 public:
  // Both outlive it.
  Disagreement(RankOperations& operations, Report& report)
      : peers_(operations.peers), collectives_(operations.collectives), report_(report) {}

  // Posts the disagreement about operation `sequence`, and this rank's operation, at once; from
  // here on no collective moves.
  void open(std::uint64_t sequence);
  // Judges when the ranks have found the difference, or when the time for that is over. Requires:
  // it is open.
  void resolve(Nanoseconds now);

 private:
  std::vector<Standing> standings() const;
  std::uint64_t earliest() const;
  bool have_compared(std::uint64_t sequence);
  bool is_worth_comparing(std::uint64_t sequence) const;
  void enter(const transport::Dispute& round);

  Peers& peers_;
  Collectives& collectives_;
  Report& report_;
  bool comparing_ = false;  // the ranks of the dispute are known and search for the difference
  Nanoseconds ends_ = 0;
};

}  // namespace pycoll::engine
