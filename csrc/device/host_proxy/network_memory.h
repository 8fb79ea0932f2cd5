// Device memory that network cards read and write directly (GPUDirect RDMA), as a region of a
// transport. It is registered by a dma-buf that the driver exports, or by its address where the
// kernel module nvidia-peermem supports that. Also decides when kernels see the bytes that cards
// have written.
//
// A card reports arrivals by a write to host memory, which may overtake the payload on its way to
// the device. So either the device keeps such writes in order, or the host flushes them before it
// lets a kernel read the payload. Where neither is possible, cards must not write there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "device/driver/gpu.h"
#include "transport/capabilities.h"

namespace pycoll::device {

// The work between a card's report of its write and a kernel's read of the bytes.
enum class CardOrder : std::uint8_t {
  kKept,     // nothing
  kFlushed,  // flush_card_writes()
  kNone,     // not possible: cards must not write there
};
CardOrder card_order(const Gpu& gpu);

// Makes memory of Reserved::Kind::kDevice, as a whole, the region of a transport. kTransport with
// the reason of each attempt. Requires: the GPU's context is current.
Status enter_region(const Gpu& gpu, Address address, std::size_t bytes, bool peers_write,
                    transport::Regions& regions);

// Makes bytes that cards have reported visible to kernels of the device. Any thread.
Status flush_card_writes(const Gpu& gpu);

// For users, the driver's statement on all devices: "0 by dma-buf, writes in order; 1 not at all".
std::string card_summary();
std::string card_summary(const Driver& driver);

}  // namespace pycoll::device
