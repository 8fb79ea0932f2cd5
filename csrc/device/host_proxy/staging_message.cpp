#include "device/host_proxy/staging_message.h"

namespace pycoll::device {

StagedMessage::~StagedMessage() {
  if (is_of_parent()) return;
  const Gpu::Current current(*gpu);
  for (EventHandle event : {ready, copied}) {
    if (event != nullptr) (void)gpu->driver().event_destroy(event);
  }
}

std::string StagedMessage::text() const {
  return std::string("device ") + (terms.sends ? "send" : "recv") + " of " +
         std::to_string(terms.bytes) + " bytes " + (terms.sends ? "to" : "from") + " rank " +
         std::to_string(terms.peer) + ", tag " + std::to_string(terms.tag);
}

}  // namespace pycoll::device
