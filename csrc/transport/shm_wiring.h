// What both ends of a shared-memory channel stand on.
#pragma once

#include "transport/shm_bell.h"
#include "transport/shm_layout.h"
#include "transport/shm_lending.h"
#include "transport/shm_stores.h"

namespace pycoll::transport::shm {

// The whole of one rank's shared segment.
template <typename Byte>
struct Whole {
  Byte* base;
  std::size_t bytes;
};

// What a channel stands on besides its slots; all of it outlives the channel.
struct Wiring {
  AckLine* own_acks;
  const AckLine* peer_acks;
  Bell* bell;      // wakes the peer
  Bell* own_bell;  // wakes this rank itself, if it is armed
  Lender* lender;
  Borrower* borrower;
  std::uint64_t* own_core;  // Running::core; nullptr where ranks have cores of their own
  StoresOptions stores;
};

}  // namespace pycoll::transport::shm
