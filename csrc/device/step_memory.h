// Device memory for the steps of operations, and copies between the host and such memory.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/channels/upload.h"
#include "device/driver/gpu.h"
#include "device/memory/reserve.h"

namespace pycoll::device {

// Threads: any, at any time, except abandon().
class StepMemory {
 public:
  // `mutex` guards `upload`; both outlive the memory.
  StepMemory(std::shared_ptr<const Gpu> gpu, Upload& upload, std::mutex& mutex)
      : gpu_(std::move(gpu)), upload_(upload), mutex_(mutex) {}

  // Memory for the steps of an operation, at least `bytes` bytes, with any content. Operations use
  // the same memory in their order, in graphs as well. It grows by new memory. kTransport where the
  // device has too little.
  Status scratch(std::size_t bytes, Address* memory);

  // Copy between the host and memory that no kernel uses meanwhile; they wait for the copy alone.
  Status read(void* to, Address from, std::size_t bytes);
  Status write(Address to, const void* from, std::size_t bytes);

  // Never reuses the memory: steps may still run.
  void abandon();

 private:
  const std::shared_ptr<const Gpu> gpu_;
  Upload& upload_;
  std::mutex& mutex_;
  std::vector<Reserved> scratch_;  // the last one is in use; operations under way may use others
};

}  // namespace pycoll::device
