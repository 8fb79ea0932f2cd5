// The part of the host's communicator for operations on the device stream. All ranks call these and
// collectives in the same order. A rank that waits in one learns of the failures of its peers.
#pragma once

#include <string>

#include "engine/engine_driver.h"

namespace pycoll::engine {

// Threads: any.
class StreamOperations {
 public:
  // `driver` outlives it.
  explicit StreamOperations(EngineDriver& driver) : driver_(driver) {}

  // As CallNumbers::count_on_stream(); takes no lock.
  void count(bool replayable) const {
    driver_.engine().operations().numbers.count_on_stream(replayable);
  }
  // As Engine::look_on_stream(); returns the failure, or ok.
  Status look(const std::string& operation, bool patient) const;
  // As Engine::fail_on_stream(); returns the failure.
  Status fail(const Status& status, const std::string& operation, double after) const;

 private:
  EngineDriver& driver_;
};

}  // namespace pycoll::engine
