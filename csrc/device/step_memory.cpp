#include "device/step_memory.h"

#include <bit>
#include <utility>

namespace pycoll::device {

Status StepMemory::scratch(std::size_t bytes, Address* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  if (status.ok() && (scratch_.empty() || scratch_.back().bytes() < bytes)) {
    Reserved larger;
    status = Reserved::take(gpu_, Reserved::Kind::kDevice, std::bit_ceil(bytes), "codes", &larger);
    if (status.ok()) scratch_.push_back(std::move(larger));
  }
  if (status.ok()) *memory = scratch_.back().address();
  return status;
}

Status StepMemory::read(void* to, Address from, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Gpu::Current current(*gpu_);
  return current.status().ok() ? upload_.fetch(to, from, bytes) : current.status();
}

Status StepMemory::write(Address to, const void* from, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Gpu::Current current(*gpu_);
  return current.status().ok() ? upload_.copy(to, from, bytes) : current.status();
}

void StepMemory::abandon() {
  for (Reserved& one : scratch_) one.abandon();
}

}  // namespace pycoll::device
