// Whether peer access tells the truth: patterns that depend on writer, reader and place, written by
// kernels into the memory that another rank's device has, and read at both ends.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/upload.h"

namespace pycoll::device {

// Memory that `writer` writes and `owner` has, aligned to 16 bytes; the probe touches 256 places of
// 16 bytes all over it.
struct Probed {
  std::uint32_t writer = 0;
  std::uint32_t owner = 0;
  Address address = 0;  // as this rank's kernels see it
  std::uint64_t bytes = 0;
};

// By the writer: kTransport where the driver fails. `agrees` is false if it reads other than it
// wrote.
Status write_pattern(Upload& upload, const Probed& probed, bool* agrees);
// By the owner, after the writer has told that it has written.
Status read_pattern(Upload& upload, const Probed& probed, bool* agrees);

}  // namespace pycoll::device
