// Small transfers between the host and its device, for what is set up once: plans, channels,
// probes.
#pragma once

#include <cstddef>
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
  Status clear(Address to, std::size_t bytes);
  // Runs the kernel that copies, as it loads and stores. Its memory may be that of staging().
  Status run(const Copy& copy);
  // The host's, and kernels reach it; copy() uses it too.
  const Reserved& staging() const { return staging_; }

 private:
  explicit Upload(std::shared_ptr<const Gpu> gpu) : gpu_(std::move(gpu)) {}

  std::shared_ptr<const Gpu> gpu_;
  StreamHandle stream_ = nullptr;
  Reserved staging_;
};

}  // namespace pycoll::device
