// Small transfers between the host and its device, for what is set up once: plans, channels,
// probes.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <utility>

#include "base/status.h"
#include "device/gpu.h"
#include "device/program.h"
#include "device/reserve.h"

namespace pycoll::device {

// In order, on a stream of its own. One thread at a time. Requires everywhere: the GPU's context is
// current.
class Upload {
 public:
  static Status open(const std::shared_ptr<const Gpu>& gpu, std::unique_ptr<Upload>* upload);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Waits until the bytes are there; no other kernel is waited for, here and below.
  Status copy(Address to, const void* from, std::size_t bytes);
  // The same without waiting; `from` may change when this returns.
  Status send(Address to, const void* from, std::size_t bytes);
  // What comes in `stream` from now on finds there what was sent.
  Status before(StreamHandle stream);
  // Waits until that is there.
  Status finish();
  Status clear(Address to, std::size_t bytes);
  // Runs the kernel that copies, as it loads and stores. Its memory may be that of staging().
  Status run(const Copy& copy);
  // The host's, and kernels reach it; copy() uses it too.
  const Reserved& staging() const { return staging_; }

 private:
  // Memory of what was sent, until it is there.
  struct Sent {
    Pieces::Piece piece;
    std::size_t bytes;
    EventHandle there;
  };

  explicit Upload(std::shared_ptr<const Gpu> gpu)
      : gpu_(std::move(gpu)), pieces_(gpu_, Reserved::Kind::kHost, "copies to the device") {}
  void drop_there();

  std::shared_ptr<const Gpu> gpu_;
  StreamHandle stream_ = nullptr;
  Reserved staging_;
  Pieces pieces_;
  std::deque<Sent> sent_;
};

}  // namespace pycoll::device
