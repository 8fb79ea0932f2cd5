// Small transfers between the host and its device, for set-up data: plans, channels, probes.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <utility>

#include "base/status.h"
#include "device/driver/gpu.h"
#include "device/kernels/program.h"
#include "device/memory/reserve.h"

namespace pycoll::device {

// Transfers run in order, on a stream that this object owns. One thread at a time. Requires
// everywhere: the GPU's context is current.
class Upload {
 public:
  static Status open(const std::shared_ptr<const Gpu>& gpu, std::unique_ptr<Upload>* upload);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Waits until the bytes have arrived; neither this nor the calls below wait for other kernels.
  Status copy(Address to, const void* from, std::size_t bytes);
  // Copies from the device to the host, and waits until the bytes have arrived.
  Status fetch(void* to, Address from, std::size_t bytes);
  // As copy() without waiting; `from` may change when this returns.
  Status send(Address to, const void* from, std::size_t bytes);
  // Work put in `stream` from now on runs after the bytes of send() have arrived.
  Status before(StreamHandle stream);
  // Waits until the sent bytes have arrived.
  Status finish();
  Status clear(Address to, std::size_t bytes);
  // Runs the copy kernel, with its loads and stores. Its memory may be that of staging().
  Status run(const Copy& copy);
  // Host memory that kernels reach; copy() uses it, too.
  const Reserved& staging() const { return staging_; }

 private:
  // The memory of bytes that are being sent.
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
