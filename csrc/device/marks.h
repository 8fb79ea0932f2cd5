// Marks: positions in streams for which streams of the device can wait, and the host can ask.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "device/driver/gpu.h"
#include "device/driver/streams.h"
#include "device/watch_thread.h"

namespace pycoll::device {

// A position in a stream; the communicator moves only the marks that no caller holds.
class Mark {
 public:
  // Makes a mark without a position. Requires: the GPU's context is current.
  static Status make(const std::shared_ptr<const Gpu>& gpu, std::shared_ptr<Mark>* mark);
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  // Moves the mark to the end of `stream`, which capture `capture` records; 0: none. Requires, here
  // and for hold(): the GPU's context is current.
  Status record(StreamHandle stream, std::uint64_t capture, const char* what = "record an event");
  // Work put in `stream` from now on waits for the mark. Requires: it was recorded.
  Status hold(StreamHandle stream, const char* what) const;
  // The capture in which it was recorded; 0: none.
  std::uint64_t capture() const { return capture_; }
  EventHandle event() const { return event_; }

 private:
  explicit Mark(std::shared_ptr<const Gpu> gpu) : gpu_(std::move(gpu)) {}
  const std::shared_ptr<const Gpu> gpu_;
  EventHandle event_ = nullptr;
  std::uint64_t capture_ = 0;
};

// The marks of callers on one device. Threads: any, at any time.
class Marks {
 public:
  // `words` and `watch_thread` outlive the object.
  Marks(std::shared_ptr<const Gpu> gpu, const Words& words, const WatchThread& watch_thread)
      : gpu_(std::move(gpu)), words_(words), watch_thread_(watch_thread) {}

  // A mark at the end of `stream`; kInvalidArgument while it is captured.
  Status mark(StreamHandle stream, std::shared_ptr<Mark>* mark) const;
  // Work put in `stream` from now on waits for the mark; the host does not.
  Status join(const Mark& mark, StreamHandle stream) const;
  // Whether the device has passed the mark; the failure if there is one.
  Status check_passed(const Mark& mark, bool* passed) const;

 private:
  const std::shared_ptr<const Gpu> gpu_;
  const Words words_;
  const WatchThread& watch_thread_;
};

}  // namespace pycoll::device
