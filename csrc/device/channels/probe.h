// Tests whether peer access works correctly. Kernels write patterns to another rank's device
// memory, and both ends read them. A pattern depends on writer, owner and place.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/channels/upload.h"

namespace pycoll::device {

// Memory of `owner` that `writer` writes, aligned to 16 bytes; the probe accesses 256 places of 16
// bytes spread over it.
struct Probed {
  std::uint32_t writer = 0;
  std::uint32_t owner = 0;
  Address address = 0;  // as this rank's kernels see it
  std::uint64_t bytes = 0;
};

// Called by the writer: kTransport where the driver fails. `agrees` is false if it reads other
// bytes than it wrote.
Status write_pattern(Upload& upload, const Probed& probed, bool* agrees);
// Called by the owner, after the writer has reported that it has written.
Status read_pattern(Upload& upload, const Probed& probed, bool* agrees);

}  // namespace pycoll::device
