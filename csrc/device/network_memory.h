// Device memory that network cards read and write by themselves (GPUDirect RDMA): as a region of a
// transport, registered by a dma-buf that the driver exports, or by its address where the kernel
// module nvidia-peermem answers for it. And when kernels see what cards have written.
//
// A card tells the host of what has arrived by a write to the host's memory, which may overtake the
// payload on its way to the device. So before the host lets a kernel read it, the device keeps such
// writes in order, or the host flushes them; where neither is said, nothing may arrive there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "device/gpu.h"
#include "transport/transport.h"

namespace pycoll::device {

// What has to be done between the arrival of what a card wrote and a kernel's reading it.
enum class CardOrder : std::uint8_t {
  kKept,     // nothing
  kFlushed,  // flush_card_writes()
  kNone,     // nothing helps: cards must not write there
};
CardOrder card_order(const Gpu& gpu);

// Makes memory of Reserved::Kind::kDevice, whole, the region of `wire`. kTransport with the reason
// of each way that was tried. Requires: the GPU's context is current.
Status enter_region(const Gpu& gpu, Address address, std::size_t bytes, bool peers_write,
                    transport::Transport& wire);

// Kernels of the device see what cards have told of before. Any thread.
Status flush_card_writes(const Gpu& gpu);

// For users, what the driver says of all devices: "0 by dma-buf, writes in order; 1 not at all".
std::string card_summary();
std::string card_summary(const Driver& driver);

}  // namespace pycoll::device
