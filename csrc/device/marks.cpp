#include "device/marks.h"

#include <atomic>
#include <utility>

namespace pycoll::device {

Status Mark::make(const std::shared_ptr<const Gpu>& gpu, std::shared_ptr<Mark>* mark) {
  std::shared_ptr<Mark> made(new Mark(gpu));
  const Driver& driver = gpu->driver();
  Status status =
      check(driver, driver.event_create(&made->event_, kEventDisableTiming), "make an event");
  if (status.ok()) *mark = std::move(made);
  return status;
}

Mark::~Mark() {
  if (event_ == nullptr) return;
  const Gpu::Current current(*gpu_);
  (void)gpu_->driver().event_destroy(event_);
}

Status Mark::record(StreamHandle stream, std::uint64_t capture, const char* what) {
  capture_ = capture;
  return check(gpu_->driver(), gpu_->driver().event_record(event_, stream), what);
}

Status Mark::hold(StreamHandle stream, const char* what) const {
  return check(gpu_->driver(), gpu_->driver().stream_wait(stream, event_, 0), what);
}

Status Marks::mark(StreamHandle stream, std::shared_ptr<Mark>* mark) const {
  const Gpu::Current current(*gpu_);
  std::uint64_t capture = 0;
  std::shared_ptr<Mark> made;
  Status status = current.status();
  if (status.ok()) status = capture_of(*gpu_, stream, &capture);
  if (status.ok() && capture != 0) {
    status = invalid_argument(
        "the stream is being captured, and another stream cannot wait for it: in a capture, pass "
        "arrays of the captured stream, and no other stream=");
  }
  if (status.ok()) status = Mark::make(gpu_, &made);
  if (status.ok()) status = made->record(stream, 0);
  if (status.ok()) *mark = std::move(made);
  return status;
}

Status Marks::join(const Mark& mark, StreamHandle stream) const {
  if (watch_thread_.has_failed()) return watch_thread_.failure();
  const Gpu::Current current(*gpu_);
  std::uint64_t capture = 0;
  Status status = current.status();
  if (status.ok()) status = check_context(*gpu_, stream);
  if (status.ok()) status = capture_of(*gpu_, stream, &capture);
  if (!status.ok()) return status;
  if (capture != mark.capture()) {
    return invalid_argument(capture != 0
                                ? "an operation that began before the capture cannot be waited for "
                                  "in it: wait before the capture begins"
                                : "the operation is part of a graph, and its stream is no longer "
                                  "captured: wait() belongs into the capture");
  }
  return mark.hold(stream, "join streams");
}

Status Marks::check_passed(const Mark& mark, bool* passed) const {
  *passed = true;
  if (mark.capture() != 0) {
    return invalid_argument(
        "the operation is part of a graph, so the host cannot wait for it: synchronize "
        "the stream that the graph is launched on");
  }
  const Gpu::Current current(*gpu_);
  // If another thread captures, the driver would treat the query as part of the capture.
  const Gpu::Uncaptured uncaptured(*gpu_);
  const int error = gpu_->driver().event_query(mark.event());
  *passed = error != kErrorNotReady;
  if (!*passed) return Status();
  if (watch_thread_.has_failed()) return watch_thread_.failure();
  // Kernels that were told to stop have ended; the watching thread sets the failure soon.
  *passed = std::atomic_ref(words_.control->stop).load(std::memory_order_acquire) == 0;
  return check(gpu_->driver(), error, "run an operation");
}

}  // namespace pycoll::device
