// The kernels of the module, as functions that an emulated thread runs.
#pragma once

#include "device/kernels/executor.h"
#include "device/kernels/kernels.h"

namespace pycoll::testing {

// What the thread that runs does of that kernel. `shared` is its block's.
void execute(device::Protocol protocol, device::KernelKind kind, const device::Program& program,
             const device::Call& call, device::Shared& shared);
// The same of the kernel for lists.
void execute(device::Protocol protocol, const device::Program& program,
             const device::ListCall& call, device::Shared& shared);

}  // namespace pycoll::testing
