// Streams of the caller, and what is put into them that waits for no other rank.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/gpu.h"
#include "device/program.h"

namespace pycoll::device {

// Copies of this rank's memory, in order, that belong to an operation: in front of it in its stream
// and behind it.
struct Copies {
  std::vector<Copy> before;
  std::vector<Copy> after;
};

// The default stream, which waits for all others that do not say otherwise.
inline bool is_legacy(StreamHandle stream) {
  return stream == nullptr || stream == legacy_stream();
}

// Threads: any, at any time. Requires everywhere: the GPU's context is current.

// kInvalidArgument for a stream of another device.
Status check_context(const Gpu& gpu, StreamHandle stream);
// The number of the capture that the stream is in, else 0. kInvalidArgument where that capture has
// failed already.
Status capture_of(const Gpu& gpu, StreamHandle stream, std::uint64_t* capture);
// Puts the copies at the end of the stream.
Status launch_copies(const Gpu& gpu, const std::vector<Copy>& copies, StreamHandle stream);

// kInvalidArgument for a stream of another device, and for one that is captured.
Status check_uncaptured(const Gpu& gpu, StreamHandle stream);
// The device's memory as the stream leaves it, for the host; and what the host has, to there. Both
// wait for the stream, and fail as check_uncaptured(). `copies` are in front of a read and behind a
// write.
Status read_in_stream(const Gpu& gpu, StreamHandle stream, const std::vector<Copy>& copies,
                      Address from, void* to, std::size_t bytes);
Status write_in_stream(const Gpu& gpu, StreamHandle stream, const std::vector<Copy>& copies,
                       Address to, const void* from, std::size_t bytes);

}  // namespace pycoll::device
