// Collectives that one rank announces to another, which takes part in them without any memory: a
// parameter server. An announcement is a message; its bytes name the collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "engine/call.h"
#include "engine/operation.h"

namespace pycoll::engine {

// The announcements that a rank knows, and the collectives that it has begun by them. It belongs to
// one communicator. One thread at a time.
struct AnnouncedCalls {
  int peer = 0;  // announces
  std::uint32_t tag = 0;
  // The peer may be this many collectives ahead of the oldest one that has not ended here.
  std::size_t ahead_max = 1;
  std::unordered_map<std::string, std::shared_ptr<Call>> known;  // by the bytes of the message
  std::deque<std::shared_ptr<Operation>> running;                // oldest first
  std::uint64_t begun = 0;
};

}  // namespace pycoll::engine
