// A transport as Python holds it.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace pycoll::bindings {

// Shared with the communicator.
struct TransportHandle {
  std::shared_ptr<transport::Transport> transport;
};

}  // namespace pycoll::bindings
