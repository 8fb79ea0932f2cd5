// The parts of a link that both ends of its channels use.
#pragma once

#include "transport/capabilities.h"
#include "transport/shm/shm_bell.h"
#include "transport/shm/shm_layout.h"
#include "transport/shm/shm_stores.h"
#include "transport/shm/shm_zero_copy.h"

namespace pycoll::transport::shm {

// The whole of one rank's shared file.
template <typename Byte>
struct Whole {
  Byte* base;
  std::size_t bytes;
};

// References of a channel to the parts of its link. All of them outlive the channel.
struct Wiring {
  AckLine* own_acks;
  const AckLine* peer_acks;
  Bell* bell;      // wakes the peer
  Bell* own_bell;  // wakes this rank itself, if it is armed
  ZeroCopySource* zero_copy_source;
  PeerArena* peer_arena;
  std::uint64_t* own_core;  // Running::core; nullptr unless ranks share cores
  StoreKind stores;
  const std::uint64_t* reader_core;  // Running::core of the peer; nullptr unless ranks share cores
};

}  // namespace pycoll::transport::shm
