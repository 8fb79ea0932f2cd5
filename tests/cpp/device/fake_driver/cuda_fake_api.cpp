// The names of libcuda.so.1, and those by which tests ask for faults (pycoll_fake_*); those of
// streams and graphs are in cuda_fake_streams.cpp.
#include "tests/cpp/device/fake_driver/cuda_fake_api.h"

#include <cstdio>
#include <cstring>
#include <utility>

#include "tests/cpp/device/fake_driver/cuda_fake_cards.h"

namespace pycoll::testing::fake {

std::vector<Device*>& contexts() {
  thread_local std::vector<Device*> stack;
  return stack;
}

Handles& handles() {
  static Handles* const all = new Handles;  // guarded by the machine's lock
  return *all;
}

namespace {

// Of every thread and device, made when it is first used.
std::shared_ptr<Stream> per_thread(Machine& machine, const Device& device) {
  thread_local std::map<int, std::shared_ptr<Stream>> mine;
  std::shared_ptr<Stream>& one = mine[device.ordinal];
  if (one == nullptr) {
    one = std::make_shared<Stream>();
    one->device = device.ordinal;
    machine.enter(one);
  }
  return one;
}

}  // namespace

std::shared_ptr<Stream> find_stream(Machine& machine, Device& device, void* handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number <= 1) return device.legacy;
  if (number == 2) return per_thread(machine, device);
  const auto found = handles().streams.find(handle);
  return found == handles().streams.end() ? nullptr : found->second;
}

Error usable(Machine& machine, Device& device, void* handle, std::shared_ptr<Stream>* stream) {
  *stream = find_stream(machine, device, handle);
  if (*stream == nullptr || (*stream)->device != device.ordinal) return kInvalidHandle;
  if (!(*stream)->legacy) return kSuccess;
  for (const auto& capture : machine.captures) {
    if (!capture->origin->blocking) continue;
    capture->invalid = true;
    return kCaptureImplicit;
  }
  return kSuccess;
}

Error add(Machine& machine, Device& device, void* handle, Op op) {
  std::shared_ptr<Stream> stream;
  if (const Error error = usable(machine, device, handle, &stream); error != kSuccess) return error;
  return machine.enqueue(*stream, std::move(op));
}

namespace {

Error copy(Machine& machine, Device& device, Address to, Address from, std::size_t bytes,
           void* handle) {
  Op op;
  op.action = [to, from, bytes] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  };
  return add(machine, device, handle, std::move(op));
}

bool is_device(Machine& machine, Address address, std::size_t bytes) {
  const Allocation* found = machine.find(address, bytes);
  return found != nullptr && !found->host;
}

const char* const kKernelNames[] = {"any", "sum_float32", "sum_bfloat16", "sum_float16", "list"};
const char* const kProtocols[] = {"ll", "ll128", "simple", "pattern"};

}  // namespace

// --- devices

EXPORT int cuInit(unsigned) {
  BEGIN();
  return kSuccess;
}
EXPORT int cuDriverGetVersion(int* version) {
  BEGIN();
  *version = machine.settings().version;
  return kSuccess;
}
EXPORT int cuDeviceGetCount(int* count) {
  BEGIN();
  *count = machine.settings().devices;
  return kSuccess;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  BEGIN();
  if (ordinal < 0 || ordinal >= machine.settings().devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}
EXPORT int cuDeviceGetName(char* name, int length, int device) {
  BEGIN();
  std::snprintf(name, static_cast<std::size_t>(length), "Fake %d", device);
  return kSuccess;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  BEGIN();
  *value = 1;
  if (attribute == device::kAttributeMajor) *value = 9;
  if (attribute == device::kAttributeMinor) *value = 0;
  if (attribute == device::kAttributeDescriptors) *value = machine.settings().descriptors ? 1 : 0;
  const CardSettings cards = Cards::get().settings();
  if (attribute == device::kAttributeDmaBuf) *value = cards.dma_buf ? 1 : 0;
  if (attribute == device::kAttributeCardOrder) *value = cards.keeps ? device::kCardOrderOwner : 0;
  if (attribute == device::kAttributeCardFlushes) *value = cards.flushes ? 3 : 2;
  if (attribute == device::kAttributeMultiprocessors) {
    *value = static_cast<int>(machine.settings().blocks);
  }
  return kSuccess;
}
EXPORT int cuDeviceGetUuid_v2(device::Uuid* uuid, int device) {
  BEGIN();
  std::memset(uuid, device + 1, sizeof(*uuid));
  return kSuccess;
}
EXPORT int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  BEGIN();
  *can = device != peer && machine.settings().peers ? 1 : 0;  // as the driver: not itself
  return kSuccess;
}
// As over PCIe.
EXPORT int cuDeviceGetP2PAttribute(int* value, int attribute, int, int) {
  BEGIN();
  *value = attribute != device::kPairNativeAtomics && machine.settings().peers ? 1 : 0;
  return kSuccess;
}
EXPORT int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {{0, "CUDA_SUCCESS"},
                                                   {1, "CUDA_ERROR_INVALID_VALUE"},
                                                   {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {101, "CUDA_ERROR_INVALID_DEVICE"},
                                                   {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {400, "CUDA_ERROR_INVALID_HANDLE"},
                                                   {600, "CUDA_ERROR_NOT_READY"},
                                                   {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"},
                                                   {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                   {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                   {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
                                                   {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
                                                   {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
                                                   {907, "CUDA_ERROR_CAPTURED_EVENT"},
                                                   {801, "CUDA_ERROR_NOT_SUPPORTED"}};
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}
EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == kOutOfMemory ? "out of memory" : error == 1 ? "invalid argument" : "as named";
  return kSuccess;
}

// --- contexts and modules

EXPORT int cuDevicePrimaryCtxRetain(void** context, int ordinal) {
  BEGIN();
  if (ordinal < 0 || ordinal >= machine.settings().devices) return kInvalidDevice;
  *context = &machine.device(ordinal);
  return kSuccess;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  BEGIN();
  contexts().push_back(static_cast<Device*>(context));
  return kSuccess;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  BEGIN();
  if (contexts().empty()) return kInvalidContext;
  *context = contexts().back();
  contexts().pop_back();
  return kSuccess;
}
EXPORT int cuCtxSetCurrent(void* context) {
  BEGIN();
  contexts().clear();
  contexts().push_back(static_cast<Device*>(context));
  return kSuccess;
}
EXPORT int cuCtxEnablePeerAccess(void* peer, unsigned) {
  BEGIN_IN_CONTEXT();
  if (!machine.settings().peers) return kInvalidDevice;
  return device.peers.insert(static_cast<Device*>(peer)->ordinal).second ? kSuccess : kPeerEnabled;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
  BEGIN_UNSAFE();
  if (handles().kernels.empty()) {
    for (std::uint32_t one = 0; one < device::kProtocolCount * device::kKernelKindCount; ++one) {
      handles().kernels.push_back(
          {static_cast<device::Protocol>(one / device::kKernelKindCount),
           static_cast<device::KernelKind>(one % device::kKernelKindCount)});
    }
    constexpr auto kLl = device::Protocol::kLl;
    constexpr auto kAny = device::KernelKind::kAny;
    handles().kernels.push_back({kLl, kAny, true, false, false});
    handles().kernels.push_back({kLl, kAny, false, true, false});
    handles().kernels.push_back({kLl, kAny, false, false, true});
  }
  *module = const_cast<void*>(image);
  return kSuccess;
}
EXPORT int cuModuleGetFunction(void** function, void*, const char* name) {
  BEGIN_IN_CONTEXT();
  for (Kernel& one : handles().kernels) {
    const std::string full =
        one.copies   ? std::string(device::kCopyName)
        : one.codes  ? std::string(device::kCodeName)
        : one.sparse ? std::string(device::kSparseName)
                     : std::string("pycoll_") + kProtocols[static_cast<std::size_t>(one.protocol)] +
                           "_" + kKernelNames[static_cast<std::size_t>(one.kind)];
    if (full != name) continue;
    *function = &one;
    return kSuccess;
  }
  return kNotFound;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, std::size_t) {
  BEGIN_IN_CONTEXT();
  *blocks = 1;
  return kSuccess;
}

// --- memory

EXPORT int cuMemAlloc_v2(Address* memory, std::size_t bytes) {
  BEGIN_UNSAFE();
  return machine.allocate(device.ordinal, bytes, false, memory);
}
// As in the driver, behind everything that the device does.
EXPORT int cuMemFree_v2(Address memory) {
  BEGIN_UNSAFE();
  machine.await(held, [&] { return machine.idle(device.ordinal); });
  return machine.free(memory, false);
}
EXPORT int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  BEGIN_UNSAFE();
  Address address = 0;
  const Error error = machine.allocate(device.ordinal, bytes, true, &address);
  *memory = reinterpret_cast<void*>(address);
  return error;
}
EXPORT int cuMemFreeHost(void* memory) {
  BEGIN_UNSAFE();
  machine.await(held, [&] { return machine.idle(device.ordinal); });
  return machine.free(reinterpret_cast<Address>(memory), true);
}
EXPORT int cuMemHostGetDevicePointer_v2(Address* address, void* memory, unsigned) {
  BEGIN_IN_CONTEXT();
  *address = reinterpret_cast<Address>(memory);
  return machine.find(*address, 1) == nullptr ? kInvalidValue : kSuccess;
}
EXPORT int cuPointerGetAttribute(void* value, int attribute, Address address) {
  BEGIN();
  const Allocation* found = machine.find(address, 0);
  if (found == nullptr) return kInvalidValue;
  if (attribute == device::kPointerBuffer) {
    *static_cast<std::uint64_t*>(value) = found->number;
    return kSuccess;
  }
  int* number = static_cast<int*>(value);
  if (attribute == device::kPointerHasIpcHandle) {
    *number = found->plain && !found->host ? 1 : 0;
  } else if (attribute == device::kPointerDevice) {
    *number = found->device;
  } else {
    *number = found->host ? 1 : device::kMemoryTypeDevice;
  }
  return kSuccess;
}
// Of memory with addresses of its own: of the piece that is mapped there.
EXPORT int cuMemGetAddressRange_v2(Address* base, std::size_t* bytes, Address address) {
  BEGIN_IN_CONTEXT();
  std::uint64_t first = 0;
  const Allocation* found = machine.find(address, 0, &first);
  if (found == nullptr) return kNotFound;
  *base = first;
  *bytes = found->bytes;
  return kSuccess;
}
// What is pinned is read when the copy runs; anything else, as in the driver, before this returns.
EXPORT int cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t bytes, void* stream) {
  BEGIN_IN_CONTEXT();
  const auto source = reinterpret_cast<Address>(from);
  if (!is_device(machine, to, bytes)) return kInvalidValue;
  if (machine.find(source, bytes) != nullptr) {
    return copy(machine, device, to, source, bytes, stream);
  }
  const auto kept = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
  Op op;
  op.action = [to, kept] { std::memcpy(reinterpret_cast<void*>(to), kept->data(), kept->size()); };
  return add(machine, device, stream, std::move(op));
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t bytes, void* stream) {
  BEGIN_IN_CONTEXT();
  if (!is_device(machine, from, bytes)) return kInvalidValue;
  return copy(machine, device, reinterpret_cast<Address>(to), from, bytes, stream);
}
EXPORT int cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t bytes, void* stream) {
  BEGIN_IN_CONTEXT();
  if (!is_device(machine, from, bytes) || !is_device(machine, to, bytes)) return kInvalidValue;
  return copy(machine, device, to, from, bytes, stream);
}
EXPORT int cuMemsetD8Async(Address to, unsigned char value, std::size_t bytes, void* stream) {
  BEGIN_IN_CONTEXT();
  if (!is_device(machine, to, bytes)) return kInvalidValue;
  Op op;
  op.action = [to, value, bytes] { std::memset(reinterpret_cast<void*>(to), value, bytes); };
  return add(machine, device, stream, std::move(op));
}
EXPORT int cuIpcGetMemHandle(device::IpcHandle* handle, Address memory) {
  BEGIN_IN_CONTEXT();
  if (!machine.settings().ipc) return kNotSupported;
  return machine.export_memory(memory, handle);
}
EXPORT int cuIpcOpenMemHandle_v2(Address* memory, device::IpcHandle handle, unsigned) {
  BEGIN_UNSAFE();
  return machine.open_memory(device.ordinal, &handle, memory);
}
EXPORT int cuIpcCloseMemHandle(Address memory) {
  BEGIN_UNSAFE();
  machine.await(held, [&] { return machine.idle(device.ordinal); });
  return machine.close_memory(memory);
}

// --- tests

// From its `after`-th call on, `function` gives `error` so many times.
EXPORT void pycoll_fake_fail(const char* function, int error, int after, int times) {
  Machine& machine = Machine::get();
  const auto held = machine.lock();
  machine.fail(function, error, after, times);
}
// Whether stores of kernels to other devices arrive wrong; only while none runs.
EXPORT void pycoll_fake_corrupt(bool corrupts) {
  Machine& machine = Machine::get();
  const auto held = machine.lock();
  machine.corrupt(corrupts);
}
// How often kernels of that protocol were launched.
EXPORT std::size_t pycoll_fake_launches(device::Protocol protocol) {
  const auto held = Machine::get().lock();
  std::size_t launches = 0;
  for (const Kernel& one : handles().kernels) {
    launches += !one.copies && one.protocol == protocol ? one.launches : 0;
  }
  return launches;
}
// How often kernels that have ended loaded 16 bytes.
EXPORT std::uint64_t pycoll_fake_loads() {
  Machine& machine = Machine::get();
  const auto held = machine.lock();
  return machine.loads();
}
EXPORT std::size_t pycoll_fake_allocated(int ordinal) {
  Machine& machine = Machine::get();
  const auto held = machine.lock();
  return machine.device(ordinal).allocated;
}

}  // namespace pycoll::testing::fake
