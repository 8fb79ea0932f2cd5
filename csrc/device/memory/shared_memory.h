// Device memory that other processes map by a descriptor, for where the driver gives no IPC
// handles: for example in containers that share no IPC namespace.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "base/unique_fd.h"
#include "device/driver/gpu.h"

namespace pycoll::device {

// All functions require: the GPU's context is current. They fail with kTransport and the driver's
// reason.

// `bytes` is a multiple of 2 MiB, as is the address.
Status allocate_shared(const Gpu& gpu, std::size_t bytes, Address* address);
// A new descriptor of memory that allocate_shared() gave.
Status export_shared(const Gpu& gpu, Address address, UniqueFd* descriptor);
// Maps memory of another process for this device.
Status import_shared(const Gpu& gpu, const UniqueFd& descriptor, std::size_t bytes,
                     Address* address);
// Unmaps imported memory.
void unmap_shared(const Gpu& gpu, Address address, std::size_t bytes);

}  // namespace pycoll::device
