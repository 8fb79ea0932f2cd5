// The options of an engine: its rank, its media, its clock.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/transport.h"

namespace pycoll::engine {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  // Each peer uses the first transport that has a link to it.
  std::vector<std::shared_ptr<transport::Transport>> transports;
  std::vector<std::string> names;  // names[r]: "host:pid", for error texts
  std::shared_ptr<Clock> clock;
  // Cores on which all ranks of this host together may run; 0: the cores of the calling thread.
  int cores = 0;
  // Whether ranks that outnumber those cores move themselves to cores with fewer ranks.
  bool cpu_balancing = true;
};

}  // namespace pycoll::engine
