// The real engines of all ranks over a simulated network, stepped by one thread. A run is a
// function of its seed, so tests can inject faults into executions and replay a failure.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "transport/sim/sim.h"

namespace pycoll::engine {

// One thread at a time. The memory of every request stays valid until the simulation is destroyed.
class Simulation {
 public:
  explicit Simulation(transport::SimOptions options);

  // `rank` enters the operation when virtual time has reached `at` and all operations added earlier
  // for this rank have ended. A dead rank enters nothing more. Returns an index for outcome().
  std::size_t add(int rank, CollectiveRequest request, Nanoseconds timeout, Nanoseconds at);
  // A message is entered at `at` and does not wait for earlier operations.
  std::size_t add(int rank, const MessageRequest& request, Nanoseconds timeout, Nanoseconds at);
  // `rank` closes its communicator once all operations added for it have ended.
  void close_when_done(int rank);

  // Steps until every operation of every live rank has ended. False if some have not ended when
  // virtual time reaches `horizon`: the operation hangs.
  [[nodiscard]] bool run(Nanoseconds horizon);

  bool done(std::size_t operation) const;
  // Requires: done(operation).
  const Status& outcome(std::size_t operation) const;
  transport::SimNetwork& network() { return network_; }
  const Engine& engine(int rank) const { return *engines_[static_cast<std::size_t>(rank)]; }

 private:
  struct Entry {
    int rank = 0;
    bool is_message = false;
    CollectiveRequest collective;
    MessageRequest message;
    Nanoseconds timeout = 0;
    Nanoseconds at = 0;
    std::shared_ptr<Operation> operation;  // nullptr until entered
  };

  [[nodiscard]] bool enter(Nanoseconds now);
  bool is_finished() const;

  transport::SimNetwork network_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<Entry> entries_;
  std::vector<bool> closing_;
};

}  // namespace pycoll::engine
