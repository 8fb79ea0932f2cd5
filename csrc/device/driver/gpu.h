// One GPU of this process: its primary context, which all libraries share, with pycoll's kernels.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"
#include "device/driver/driver.h"
#include "device/kernels/kernels.h"

namespace pycoll::device {

// The CUDA version that compiles the kernels, in the driver's format: 1000 * major + 10 * minor.
inline constexpr int kCudaVersion = 13000;

// Finds the device of the memory at `address`. kInvalidArgument, naming the argument, if it is no
// device memory. Requires: the driver was started.
Status locate(const Driver& driver, const void* address, const std::string& name, int* ordinal);

// Threads: every method may be called from any thread at any time.
class Gpu {
 public:
  // Makes the GPU's context current on this thread during its lifetime. Afterwards the context
  // before it is current again.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const Gpu& gpu_;
    Status status_;
  };

  // Allows this thread calls that the driver refuses while any thread of the process captures, for
  // example to allocate or to query an event. Calls made in its lifetime are part of no graph.
  class Uncaptured {
   public:
    explicit Uncaptured(const Gpu& gpu);
    ~Uncaptured();
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

   private:
    const Gpu& gpu_;
    int mode_ = kCaptureModeRelaxed;
  };

  // The right to launch grids whose blocks all run at once. One holder per device and process.
  // Drivers may run such grids one after the other. If two communicators shared devices, device A
  // could run one of them first and device B the other; both would wait for ever.
  class Together {
   public:
    explicit Together(std::shared_ptr<const Gpu> gpu);
    ~Together();
    Together(const Together&) = delete;
    Together& operator=(const Together&) = delete;
    bool held() const { return held_; }

   private:
    const std::shared_ptr<const Gpu> gpu_;
    const bool held_;
  };

  // Opens device `ordinal` with the module `image`, once per process. It stays open as long as the
  // process, since arrays of the user live in the same context. kInvalidArgument where there is no
  // such device or the build has no kernels; kTransport where the driver is too old or fails.
  static Status open(const Driver& driver, std::span<const std::byte> image, int ordinal,
                     std::shared_ptr<const Gpu>* gpu);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const Driver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  ContextHandle context() const { return context_; }
  const Uuid& uuid() const { return uuid_; }
  const std::string& name() const { return name_; }
  // Blocks of kThreadsMax threads, of any kernel, that run at the same time.
  std::uint32_t blocks_max() const { return blocks_max_; }
  // Blocks of kCodingThreads threads of coder() that run at the same time, about as many as of
  // sparse_coder().
  std::uint32_t coder_blocks() const { return coder_blocks_; }
  // Whether descriptors can name its memory (shared_memory.h).
  bool has_descriptors() const { return has_descriptors_; }
  // The driver's current value of one of kAttribute...; 0 if the driver does not know it.
  int attribute(int which) const;
  FunctionHandle kernel(Protocol protocol, KernelKind kind) const {
    return kernels_[static_cast<std::size_t>(protocol)][static_cast<std::size_t>(kind)];
  }
  FunctionHandle copier() const { return copier_; }
  FunctionHandle coder() const { return coder_; }
  FunctionHandle sparse_coder() const { return sparse_coder_; }
  // Puts a kernel at the end of `stream` and returns the driver's error. kTogether: all blocks run
  // at once, or the launch fails; see Together.
  enum class Launch : std::uint8_t { kPlain, kTogether };
  int launch(Launch kind, FunctionHandle function, std::uint32_t blocks, std::uint32_t threads,
             StreamHandle stream, void** parameters) const;
  // The ordinal in this process of the device with this UUID; -1 if the process does not see it.
  int find(const Uuid& uuid) const;
  // Whether kernels can reach the memory of another device; true for the same device.
  bool can_reach(int ordinal) const;
  // Enables that access. Requires: can_reach().
  Status reach(int ordinal) const;

 private:
  Gpu(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  Status start(std::span<const std::byte> image);
  Status load(std::span<const std::byte> image);

  const Driver& driver_;
  const int ordinal_;
  int device_ = 0;
  ContextHandle context_ = nullptr;
  Uuid uuid_{};
  std::string name_;
  std::uint32_t blocks_max_ = 0;
  std::uint32_t coder_blocks_ = 0;
  bool has_descriptors_ = false;
  mutable std::atomic<bool> together_{false};  // a Together holds the right
  FunctionHandle copier_ = nullptr;
  FunctionHandle coder_ = nullptr;
  FunctionHandle sparse_coder_ = nullptr;
  std::array<std::array<FunctionHandle, kKernelKindCount>, kProtocolCount> kernels_{};
};

}  // namespace pycoll::device
