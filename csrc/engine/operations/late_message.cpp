#include "engine/operations/late_message.h"

namespace pycoll::engine {

std::string name_message(LateMessage::Kind kind, int peer, std::uint32_t tag) {
  std::string text = kind == LateMessage::Kind::kSend ? "send to " : "recv from ";
  text += kind == LateMessage::Kind::kRecvFromAny ? "any rank" : "rank " + std::to_string(peer);
  return text + " with tag " + std::to_string(tag);
}

}  // namespace pycoll::engine
