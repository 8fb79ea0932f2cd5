// Streams of the caller, and steps in them that wait for no other rank.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "base/status.h"
#include "device/driver/gpu.h"
#include "device/kernels/codes/coding.h"
#include "device/kernels/codes/sparse_coding.h"
#include "device/kernels/program.h"

namespace pycoll::device {

// A kernel that uses this rank's memory alone.
using LocalStep = std::variant<Copy, Coding, SparseCoding>;

// Steps on this rank's memory that belong to an operation, in order: before it in its stream and
// after it. Neighbouring codings of one kind and phase may run at the same time: none of them reads
// memory that another one of them writes.
struct Copies {
  std::vector<LocalStep> before;
  std::vector<LocalStep> after;
};

// The default stream, which synchronizes with all streams that do not opt out.
inline bool is_legacy(StreamHandle stream) {
  return stream == nullptr || stream == legacy_stream();
}

// Threads: any, at any time. Requires everywhere: the GPU's context is current.

// kInvalidArgument for a stream of another device.
Status check_context(const Gpu& gpu, StreamHandle stream);
// The id of the capture that the stream is in, else 0. kInvalidArgument where that capture has
// failed already.
Status capture_of(const Gpu& gpu, StreamHandle stream, std::uint64_t* capture);
// Puts the steps at the end of the stream. Steps that check codes need the communicator's words.
Status launch_steps(const Gpu& gpu, const std::vector<LocalStep>& steps, StreamHandle stream,
                    Control* control = nullptr);

// kInvalidArgument for a stream of another device, and for a captured one: host staging cannot be
// captured.
Status check_uncaptured(const Gpu& gpu, StreamHandle stream);

// The streams that one rank uses, where other ranks may be threads of this process on the same
// device. An operation that waits for another rank must not stand before that rank's operation in
// one stream.
class OwnStreams {
 public:
  // `group` is the same on all ranks of a communicator, and different from that of all others.
  OwnStreams(const Gpu& gpu, std::uint64_t group, std::uint32_t rank)
      : gpu_(gpu), group_(group), rank_(rank) {}
  ~OwnStreams() { forget(); }
  OwnStreams(const OwnStreams&) = delete;
  OwnStreams& operator=(const OwnStreams&) = delete;

  // kInvalidArgument for a stream of another device, a stream that another rank has entered, and
  // the default stream together with other ranks' streams. Threads: any.
  Status enter(StreamHandle stream);
  void forget();

 private:
  const Gpu& gpu_;
  const std::uint64_t group_;
  const std::uint32_t rank_;
};
// The error for the default stream; `one` and `other` are the ranks.
Status refuse_default_stream(std::uint32_t one, std::uint32_t other);

}  // namespace pycoll::device
