#include "device/driver/gpu.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "device/kernels/codes/coding.h"

namespace pycoll::device {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Status check_version(const Driver& driver) {
  int version = 0;
  Status status = check(driver, driver.driver_version(&version), "tell its version");
  if (!status.ok() || version >= kCudaVersion) return status;
  return Status::error(Code::kTransport, "the NVIDIA driver knows CUDA " + version_text(version) +
                                             ", pycoll's kernels need " +
                                             version_text(kCudaVersion) + ": update the driver");
}

Status check_ordinal(const Driver& driver, int ordinal) {
  int count = 0;
  Status status = check(driver, driver.device_count(&count), "count devices");
  if (!status.ok() || (ordinal >= 0 && ordinal < count)) return status;
  return invalid_argument("device is " + std::to_string(ordinal) + ": this process sees " +
                          std::to_string(count) + " devices");
}

struct Opened {
  std::mutex mutex;
  std::map<std::pair<const Driver*, int>, std::shared_ptr<const Gpu>> gpus;
};
Opened& get_opened() {
  // Never destroyed: threads may call until the process ends.
  static Opened* const all = new Opened;
  return *all;
}

}  // namespace

Status locate(const Driver& driver, const void* address, const std::string& name, int* ordinal) {
  const auto at = reinterpret_cast<Address>(address);
  unsigned int type = 0;
  if (driver.pointer_attribute(&type, kPointerMemoryType, at) != 0 ||
      driver.pointer_attribute(ordinal, kPointerDevice, at) != 0) {
    return invalid_argument(name + " is memory that the CUDA driver does not know: was it freed?");
  }
  if (type == kMemoryTypeDevice) return Status();
  return invalid_argument(
      name +
      " is host memory behind a device array's interface: pass it as an array of the "
      "host");
}

Gpu::Current::Current(const Gpu& gpu) : gpu_(gpu) {
  status_ = check(gpu.driver_, gpu.driver_.context_push(gpu.context_),
                  "use the context of device " + std::to_string(gpu.ordinal_));
}

Gpu::Current::~Current() {
  ContextHandle popped = nullptr;
  if (status_.ok()) (void)gpu_.driver_.context_pop(&popped);
}

Gpu::Uncaptured::Uncaptured(const Gpu& gpu) : gpu_(gpu) {
  (void)gpu_.driver_.exchange_capture_mode(&mode_);
}

Gpu::Uncaptured::~Uncaptured() { (void)gpu_.driver_.exchange_capture_mode(&mode_); }

Gpu::Together::Together(std::shared_ptr<const Gpu> gpu)
    : gpu_(std::move(gpu)), held_(!gpu_->together_.exchange(true)) {}

Gpu::Together::~Together() {
  if (held_) gpu_->together_ = false;
}

Status Gpu::open(const Driver& driver, std::span<const std::byte> image, int ordinal,
                 std::shared_ptr<const Gpu>* gpu) {
  Opened& all = get_opened();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& known = all.gpus[{&driver, ordinal}];
  if (known != nullptr) {
    *gpu = known;
    return Status();
  }
  const std::shared_ptr<Gpu> made(new Gpu(driver, ordinal));
  Status status = made->start(image);
  if (!status.ok()) return status;
  known = made;
  *gpu = made;
  return Status();
}

Status Gpu::start(std::span<const std::byte> image) {
  if (image.empty()) {
    return invalid_argument(
        "this build of pycoll has no CUDA kernels: build it where nvcc of CUDA 13 or "
        "newer is found, or pass arrays in host memory");
  }
  Status status = check(driver_, driver_.init(0), "start");
  if (status.ok()) status = check_version(driver_);
  if (status.ok()) status = check_ordinal(driver_, ordinal_);
  if (!status.ok()) return status;
  const std::string name = "device " + std::to_string(ordinal_);
  status = check(driver_, driver_.device_get(&device_, ordinal_), "find " + name);
  if (status.ok()) {
    status = check(driver_, driver_.device_uuid(&uuid_, device_), "tell the UUID of " + name);
  }
  if (status.ok()) {
    status =
        check(driver_, driver_.context_retain(&context_, device_), "make the context of " + name);
  }
  char text[64] = {};
  if (status.ok()) {
    status = check(driver_, driver_.device_name(text, sizeof(text) - 1, device_), "name " + name);
  }
  if (!status.ok()) return status;
  name_ = text;
  int descriptors = 0;
  has_descriptors_ = driver_.device_attribute(&descriptors, kAttributeDescriptors, device_) == 0 &&
                     descriptors != 0;
  const Current current(*this);
  return current.status().ok() ? load(image) : current.status();
}

// Loads all kernels at once. A driver that loads a kernel at its first launch may wait for running
// kernels, and those may wait for this one.
Status Gpu::load(std::span<const std::byte> image) {
  ModuleHandle module = nullptr;
  const Uncaptured uncaptured(*this);
  Status status = check(driver_, driver_.module_load(&module, image.data()),
                        "load pycoll's kernels on device " + std::to_string(ordinal_));
  int cooperative = 0;
  int multiprocessors = 0;
  int coders = 0;
  int resident = 1 << 20;
  for (std::uint32_t protocol = 0; protocol < kProtocolCount && status.ok(); ++protocol) {
    for (std::uint32_t kind = 0; kind < kKernelKindCount && status.ok(); ++kind) {
      const std::string name =
          kernel_name(static_cast<Protocol>(protocol), static_cast<KernelKind>(kind));
      FunctionHandle& kernel = kernels_[protocol][kind];
      status = check(driver_, driver_.module_function(&kernel, module, name.c_str()),
                     "find the kernel " + name);
      int blocks = 0;
      if (!status.ok()) break;
      status = check(driver_, driver_.occupancy(&blocks, kernel, kThreadsMax, 0),
                     "tell how many blocks of " + name + " run at once");
      resident = std::min(resident, blocks);
    }
  }
  for (const auto& [name, kernel] :
       {std::pair(kCopyName, &copier_), {kCodeName, &coder_}, {kSparseName, &sparse_coder_}}) {
    if (!status.ok()) break;
    status = check(driver_, driver_.module_function(kernel, module, name),
                   std::string("find the kernel ") + name);
  }
  if (!status.ok()) return status;
  status = check(driver_, driver_.occupancy(&coders, coder_, kCodingThreads, 0),
                 std::string("tell how many blocks of ") + kCodeName + " run at once");
  if (!status.ok()) return status;
  status = check(driver_, driver_.device_attribute(&cooperative, kAttributeCooperative, device_),
                 "tell whether it launches cooperatively");
  if (status.ok()) {
    status = check(driver_,
                   driver_.device_attribute(&multiprocessors, kAttributeMultiprocessors, device_),
                   "count multiprocessors");
  }
  if (!status.ok()) return status;
  if (cooperative == 0) {
    return invalid_argument(
        "device " + std::to_string(ordinal_) +
        " has no cooperative launches, so that blocks that wait for each other might "
        "never run: pass arrays in host memory");
  }
  blocks_max_ = static_cast<std::uint32_t>(resident * multiprocessors);
  coder_blocks_ = static_cast<std::uint32_t>(coders * multiprocessors);
  return Status();
}

int Gpu::attribute(int which) const {
  int value = 0;
  return driver_.device_attribute(&value, which, device_) == 0 ? value : 0;
}

int Gpu::launch(Launch kind, FunctionHandle function, std::uint32_t blocks, std::uint32_t threads,
                StreamHandle stream, void** parameters) const {
  if (kind == Launch::kTogether) {
    return driver_.launch_cooperative(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters);
  }
  return driver_.launch_plain(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters,
                              nullptr);
}

int Gpu::find(const Uuid& uuid) const {
  int count = 0;
  if (driver_.device_count(&count) != 0) return -1;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    Uuid found{};
    if (driver_.device_get(&device, ordinal) != 0) continue;
    if (driver_.device_uuid(&found, device) != 0) continue;
    if (std::memcmp(&found, &uuid, sizeof(Uuid)) == 0) return ordinal;
  }
  return -1;
}

bool Gpu::can_reach(int ordinal) const {
  int peer = 0;
  int can = 0;
  if (ordinal == ordinal_) return true;  // the driver reports false for the same device
  return driver_.device_get(&peer, ordinal) == 0 &&
         driver_.device_can_access_peer(&can, device_, peer) == 0 && can != 0;
}

Status Gpu::reach(int ordinal) const {
  if (ordinal == ordinal_) return Status();
  const std::string pair =
      "device " + std::to_string(ordinal_) + " reach device " + std::to_string(ordinal);
  int peer = 0;
  ContextHandle context = nullptr;
  Status status = check(driver_, driver_.device_get(&peer, ordinal), "let " + pair);
  if (status.ok()) {
    status = check(driver_, driver_.context_retain(&context, peer), "let " + pair);
  }
  if (!status.ok()) return status;
  const Current current(*this);
  if (!current.status().ok()) return current.status();
  const int error = driver_.context_enable_peer(context, 0);
  return error == kErrorPeerAlreadyEnabled ? Status() : check(driver_, error, "let " + pair);
}

}  // namespace pycoll::device
