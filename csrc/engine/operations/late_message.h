// Names of messages, and a message that is late.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pycoll::engine {

// A message that did not arrive, or was not received.
struct LateMessage {
  enum class Kind : std::uint8_t { kSend, kRecv, kRecvFromAny } kind = Kind::kRecv;
  int waiter = 0;  // the rank whose send or recv it is
  int peer = 0;    // its other side; for a recv from any rank the lowest other rank
  std::uint32_t tag = 0;
  // For a recv: tags of messages that have arrived from its source and are unclaimed, ascending.
  std::vector<std::uint32_t> unreceived;
};

// A rank for which an operation waits.
struct PeerWait {
  int rank = 0;
  bool sent = false;  // a segment of the operation has come from it
};

// "recv from rank 3 with tag 5", "send to rank 3 with tag 5", "recv from any rank with tag 5"
std::string name_message(LateMessage::Kind kind, int peer, std::uint32_t tag);

}  // namespace pycoll::engine
