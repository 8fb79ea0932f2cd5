// Operations on the device stream: what a rank that waits in one learns about the order in which
// its peers call, and about failures that kernels have found.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "engine/diagnosis/report.h"
#include "engine/operations/rank_operations.h"

namespace pycoll::engine {

// One thread at a time.
class StreamOrder {
 public:
  // Both outlive it.
  StreamOrder(RankOperations& operations, Report& report)
      : operations_(operations), report_(report) {}

  // Checks the order of calls. A peer calls in another order if it has entered a collective that
  // this rank has not called, and has called fewer operations on the device stream. Each then waits
  // for the other. True if the communicator has failed.
  bool look(const std::string& operation);
  // Fails because an operation on the device stream has failed here after `after` seconds. Peers
  // fail with the same code.
  void fail(const Status& status, const std::string& operation, double after);
  // Handles a mismatch about an operation on the device stream; false if the notice is of another
  // one.
  bool hear(int peer, const transport::Notice& notice);
  // Fails because of codes that do not decode. Kernels of this rank may not have checked them yet,
  // and each rank has its own copy of them.
  void hear_codes(int peer, const transport::Notice& notice);

 private:
  void hear_mismatch(int peer, const transport::Notice& notice);
  void hear_apart(const transport::Notice& notice);

  RankOperations& operations_;
  Report& report_;
  std::uint64_t told_ = 0;  // the count in this rank's last notice
  // When a different order of calls fails the communicator, at the latest; 0: no order differs.
  Nanoseconds ends_ = 0;
};

}  // namespace pycoll::engine
