// All operations of one rank in one communicator, and the peers with which it runs them.
#pragma once

#include <utility>

#include "engine/operations/call_numbers.h"
#include "engine/operations/collectives.h"
#include "engine/operations/open_messages.h"
#include "engine/operations/options.h"
#include "engine/operations/peers.h"

namespace pycoll::engine {

// One thread at a time, except for the numbers.
struct RankOperations {
  explicit RankOperations(EngineOptions options) : peers(std::move(options)) {}

  bool active() const { return !collectives.idle() || messages.active(); }
  // Whether everything in progress is short: all running collectives, all open messages, and the
  // messages that arrive without a receive.
  bool are_short() const { return collectives.are_short() && messages.are_short(); }

  Peers peers;
  CallNumbers numbers;
  Collectives collectives{peers, numbers};
  OpenMessages messages{peers};
};

}  // namespace pycoll::engine
