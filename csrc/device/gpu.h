// One GPU as this process uses it: its primary context, which is every library's, with our kernels.
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
#include "device/driver.h"
#include "device/kernels.h"

namespace pycoll::device {

// CUDA's version that kernels are compiled by, as the driver counts: 1000 * major + 10 * minor.
inline constexpr int kCudaVersion = 13000;

// Which device the memory at `address` is on. kInvalidArgument, naming the argument, where it is on
// none. Requires: the driver was started.
Status locate(const Driver& driver, const void* address, const std::string& name, int* ordinal);

// Threads: every method may be called from any thread at any time.
class Gpu {
 public:
  // Makes the GPU's context current on this thread while it lives, whatever was current before.
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

  // Allows this thread what the driver refuses while a capture is under way somewhere in the
  // process, as to allocate or to ask an event: what is done meanwhile is no part of any graph.
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

  // The right to launch grids whose blocks all run at once. One holder per device and process:
  // drivers may run such grids one after the other, so that two communicators whose ranks meet on
  // several devices in different order would wait for each other for ever.
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

  // Opens device `ordinal` with the module `image`: once per process, and for as long as it lives,
  // for arrays of the user live in the same context. kInvalidArgument where there is no such device
  // or the build has no kernels; kTransport where the driver is too old or does not do what it
  // should.
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
  // Whether its memory can have descriptors (shared_memory.h).
  bool has_descriptors() const { return has_descriptors_; }
  // What the driver says of it now, one of kAttribute...; 0 if it does not know.
  int attribute(int which) const;
  FunctionHandle kernel(Protocol protocol, KernelKind kind) const {
    return kernels_[static_cast<std::size_t>(protocol)][static_cast<std::size_t>(kind)];
  }
  FunctionHandle copier() const { return copier_; }
  // Puts a kernel at the end of `stream` and gives the driver's error. kTogether: all of its blocks
  // run at once, or it fails; see Together.
  enum class Launch : std::uint8_t { kPlain, kTogether };
  int launch(Launch kind, FunctionHandle function, std::uint32_t blocks, std::uint32_t threads,
             StreamHandle stream, void** parameters) const;
  // The number of the device that this process sees by this identity; -1 if it sees none.
  int find(const Uuid& uuid) const;
  // Whether the machine lets kernels reach the memory of another device; true for the same device.
  bool can_reach(int ordinal) const;
  // Lets them. Requires: can_reach().
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
  bool has_descriptors_ = false;
  mutable std::atomic<bool> together_{false};  // somebody has the right to
  FunctionHandle copier_ = nullptr;
  std::array<std::array<FunctionHandle, kKernelKindCount>, kProtocolCount> kernels_{};
};

}  // namespace pycoll::device
