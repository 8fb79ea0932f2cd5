// Refused collectives: how the peers of a rank that has refused its arguments hear of it, and how
// they end what they have begun.
#pragma once

#include <string>

#include "engine/diagnosis/report.h"
#include "engine/operations/rank_operations.h"
#include "transport/transport.h"

namespace pycoll::engine {

// One thread at a time.
class RefusalExchange {
 public:
  // Both outlive it.
  RefusalExchange(RankOperations& operations, Report& report)
      : operations_(operations), report_(report) {}

  // Tells the peers that this rank takes no part in the operations of these numbers.
  void tell(Numbers numbers, const std::string& why);
  // Tells them of the collectives that could not begin here, and begins those behind them.
  void tell_invalid();
  // Ends the oldest collective if a peer has refused it; true if it has ended. Handles one
  // operation at a time; later ones are checked when they are the oldest.
  bool look();
  // Fails with the reason of a rank that could not continue.
  void hear(int peer, const transport::Notice& notice);
  // Checks for a refusal of the operation on the device stream in which this rank waits; true if
  // the communicator has failed.
  bool look_on_stream(const std::string& operation);

 private:
  void drop_oldest(int peer, const transport::Refusals& refusals);

  RankOperations& operations_;
  Report& report_;
};

}  // namespace pycoll::engine
