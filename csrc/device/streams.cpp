#include "device/streams.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/bytes.h"

namespace pycoll::device {
namespace {

Status refused(std::string message) {
  return Status::error(Code::kInvalidArgument, std::move(message));
}

Status await(const Gpu& gpu, StreamHandle stream) {
  return check(gpu.driver(), gpu.driver().stream_synchronize(stream), "wait for a message's array");
}

}  // namespace

Status capture_of(const Gpu& gpu, StreamHandle stream, std::uint64_t* capture) {
  int state = kCaptureNone;
  std::uint64_t id = 0;
  *capture = 0;
  Status status =
      check(gpu.driver(),
            gpu.driver().stream_capture_info(stream, &state, &id, nullptr, nullptr, nullptr),
            "use the stream (while another one is captured, the default stream "
            "cannot be used)");
  if (!status.ok() || state == kCaptureNone) return status;
  if (state == kCaptureActive) {
    *capture = id;
    return Status();
  }
  return refused(
      "the stream is being captured, and that capture has failed already: end it, and "
      "look for the first call that was not allowed in it");
}

Status check_context(const Gpu& gpu, StreamHandle stream) {
  if (is_legacy(stream) || stream == per_thread_stream()) return Status();  // of any device
  ContextHandle context = nullptr;
  Status status =
      check(gpu.driver(), gpu.driver().stream_context(stream, &context), "find the stream");
  if (!status.ok() || context == gpu.context()) return status;
  return refused("stream is of another device than this rank's, which is device " +
                 std::to_string(gpu.ordinal()) + ": pass a stream of that device");
}

Status check_uncaptured(const Gpu& gpu, StreamHandle stream) {
  std::uint64_t capture = 0;
  Status status = check_context(gpu, stream);
  if (status.ok()) status = capture_of(gpu, stream, &capture);
  if (!status.ok() || capture == 0) return status;
  return refused(
      "the stream is being captured, but the ranks' devices have not met yet, so that the host "
      "carries messages, which cannot be captured: call a collective on device arrays before the "
      "capture begins");
}

Status launch_copies(const Gpu& gpu, const std::vector<Copy>& copies, StreamHandle stream) {
  for (Copy one : copies) {
    if (one.count == 0) continue;
    const std::uint64_t wanted = div_ceil(one.count, kThreadsMax);
    one.blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, gpu.blocks_max()));
    void* parameters[] = {&one};
    Status status = check(
        gpu.driver(),
        gpu.launch(Gpu::Launch::kPlain, gpu.copier(), one.blocks, kThreadsMax, stream, parameters),
        "launch a copy of an array that is not contiguous");
    if (!status.ok()) return status;
  }
  return Status();
}

Status read_in_stream(const Gpu& gpu, StreamHandle stream, const std::vector<Copy>& copies,
                      Address from, void* to, std::size_t bytes) {
  Status status = check_uncaptured(gpu, stream);
  if (status.ok()) status = launch_copies(gpu, copies, stream);
  if (status.ok() && bytes != 0) {
    status = check(gpu.driver(), gpu.driver().copy_to_host(to, from, bytes, stream),
                   "copy a message to the host");
  }
  // The memory is pageable: it is not there before the stream is past the copy.
  return status.ok() ? await(gpu, stream) : status;
}

Status write_in_stream(const Gpu& gpu, StreamHandle stream, const std::vector<Copy>& copies,
                       Address to, const void* from, std::size_t bytes) {
  Status status = check_uncaptured(gpu, stream);
  if (status.ok() && bytes != 0) {
    status = check(gpu.driver(), gpu.driver().copy_to_device(to, from, bytes, stream),
                   "copy a message to the device");
  }
  if (status.ok()) status = launch_copies(gpu, copies, stream);
  return status.ok() ? await(gpu, stream) : status;
}

}  // namespace pycoll::device
