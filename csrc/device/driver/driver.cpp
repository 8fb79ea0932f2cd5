#include "device/driver/driver.h"

#include <dlfcn.h>

#include <map>

namespace pycoll::device {
namespace {

template <typename Function>
void find(void* library, const char* name, Function*& entry, std::string& missing) {
  entry = reinterpret_cast<Function*>(::dlsym(library, name));
  if (entry == nullptr && missing.empty()) {
    missing = std::string("libcuda.so.1 has no ") + name + "; install a newer NVIDIA driver";
  }
}

template <typename Get>
void find_devices(const Get& get, Driver& driver) {
  get("cuInit", driver.init);
  get("cuDriverGetVersion", driver.driver_version);
  get("cuDeviceGetCount", driver.device_count);
  get("cuDeviceGet", driver.device_get);
  get("cuDeviceGetName", driver.device_name);
  get("cuDeviceGetAttribute", driver.device_attribute);
  get("cuDeviceGetUuid_v2", driver.device_uuid);
  get("cuDeviceCanAccessPeer", driver.device_can_access_peer);
  get("cuDeviceGetP2PAttribute", driver.device_pair_attribute);
  get("cuGetErrorString", driver.error_text);
  get("cuGetErrorName", driver.error_name);
  get("cuDevicePrimaryCtxRetain", driver.context_retain);
  get("cuCtxPushCurrent_v2", driver.context_push);
  get("cuCtxPopCurrent_v2", driver.context_pop);
  get("cuCtxEnablePeerAccess", driver.context_enable_peer);
  get("cuModuleLoadData", driver.module_load);
  get("cuModuleGetFunction", driver.module_function);
  get("cuOccupancyMaxActiveBlocksPerMultiprocessor", driver.occupancy);
}

template <typename Get>
void find_memory(const Get& get, Driver& driver) {
  get("cuMemAlloc_v2", driver.memory_allocate);
  get("cuMemFree_v2", driver.memory_free);
  get("cuMemHostAlloc", driver.host_allocate);
  get("cuMemFreeHost", driver.host_free);
  get("cuMemHostGetDevicePointer_v2", driver.host_device_pointer);
  get("cuPointerGetAttribute", driver.pointer_attribute);
  get("cuMemGetAddressRange_v2", driver.address_range);
  get("cuMemcpyHtoDAsync_v2", driver.copy_to_device);
  get("cuMemcpyDtoHAsync_v2", driver.copy_to_host);
  get("cuMemcpyDtoDAsync_v2", driver.copy_on_device);
  get("cuMemsetD8Async", driver.set_bytes);
  get("cuIpcGetMemHandle", driver.ipc_get);
  get("cuIpcOpenMemHandle_v2", driver.ipc_open);
  get("cuIpcCloseMemHandle", driver.ipc_close);
}

template <typename Get>
void find_allocations(const Get& get, Driver& driver) {
  get("cuMemCreate", driver.allocation_create);
  get("cuMemRelease", driver.allocation_release);
  get("cuMemRetainAllocationHandle", driver.allocation_of);
  get("cuMemExportToShareableHandle", driver.allocation_export);
  get("cuMemImportFromShareableHandle", driver.allocation_import);
  get("cuMemAddressReserve", driver.address_reserve);
  get("cuMemAddressFree", driver.address_free);
  get("cuMemMap", driver.memory_map);
  get("cuMemUnmap", driver.memory_unmap);
  get("cuMemSetAccess", driver.memory_access);
  get("cuMemGetHandleForAddressRange", driver.range_handle);
  get("cuFlushGPUDirectRDMAWrites", driver.flush_card_writes);
}

template <typename Get>
void find_streams(const Get& get, Driver& driver) {
  get("cuStreamCreate", driver.stream_create);
  get("cuStreamDestroy_v2", driver.stream_destroy);
  get("cuStreamSynchronize", driver.stream_synchronize);
  get("cuStreamWaitEvent", driver.stream_wait);
  get("cuStreamGetCtx", driver.stream_context);
  get("cuStreamWaitValue32_v2", driver.stream_wait_value);
  get("cuStreamGetCaptureInfo_v2", driver.stream_capture_info);
  get("cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  get("cuEventCreate", driver.event_create);
  get("cuEventDestroy_v2", driver.event_destroy);
  get("cuEventRecord", driver.event_record);
  get("cuEventQuery", driver.event_query);
  get("cuLaunchCooperativeKernel", driver.launch_cooperative);
  get("cuLaunchKernel", driver.launch_plain);
}

struct Library {
  Driver driver{};
  std::string missing;  // why the table cannot be used; empty if it can
  Library() { (void)open_driver("libcuda.so.1", &driver, &missing); }
};

std::string describe_failure(const Driver& driver, const char* what, int error) {
  const char* text = nullptr;
  if (driver.error_text(error, &text) != 0 || text == nullptr) text = "unknown error";
  return std::string("of no use: ") + what + " gives error " + std::to_string(error) + " (" + text +
         ")";
}

std::string describe(const Driver& driver, int ordinal) {
  int device = 0;
  char name[128] = {};
  int major = 0;
  int minor = 0;
  const bool known = driver.device_get(&device, ordinal) == 0 &&
                     driver.device_name(name, sizeof(name) - 1, device) == 0 &&
                     driver.device_attribute(&major, kAttributeMajor, device) == 0 &&
                     driver.device_attribute(&minor, kAttributeMinor, device) == 0;
  if (!known) return std::to_string(ordinal) + " unknown";
  return std::to_string(ordinal) + " " + name + " (sm_" + std::to_string(major) +
         std::to_string(minor) + ")";
}

// The driver reports atomics on the link itself for NVLink; PCIe has none.
std::string link_of(const Driver& driver, int one, int other) {
  int device = 0;
  int peer = 0;
  int can = 0;
  int atomics = 0;
  if (driver.device_get(&device, one) != 0 || driver.device_get(&peer, other) != 0 ||
      driver.device_can_access_peer(&can, device, peer) != 0 || can == 0) {
    return "by way of the host";
  }
  const bool is_fast =
      driver.device_pair_attribute(&atomics, kPairNativeAtomics, device, peer) == 0 && atomics != 0;
  return is_fast ? "over NVLink" : "over PCIe";
}

// The links between devices: "; all pairs over NVLink", "; 0-1 over NVLink; 0-2, 1-2 over PCIe".
std::string describe_links(const Driver& driver, int count) {
  std::map<std::string, std::string> pairs;
  for (int one = 0; one < count; ++one) {
    for (int other = one + 1; other < count; ++other) {
      std::string& list = pairs[link_of(driver, one, other)];
      list += (list.empty() ? "" : ", ") + std::to_string(one) + "-" + std::to_string(other);
    }
  }
  if (pairs.size() == 1 && count > 2) return "; all pairs " + pairs.begin()->first;
  std::string text;
  for (const auto& [link, list] : pairs) text.append("; ").append(list).append(" ").append(link);
  return text;
}

}  // namespace

bool open_driver(const char* name, Driver* driver, std::string* why) {
  // Never closed: the driver keeps threads of its own.
  void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = ::dlerror();
    *why = std::string("libcuda.so.1 cannot be opened (") +
           (error != nullptr ? error : "no reason given") + "); it comes with the NVIDIA driver";
    return false;
  }
  std::string missing;
  const auto get = [&](const char* function, auto& entry) {
    find(handle, function, entry, missing);
  };
  find_devices(get, *driver);
  find_memory(get, *driver);
  find_allocations(get, *driver);
  find_streams(get, *driver);
  if (missing.empty()) return true;
  *why = missing;
  return false;
}

const Driver* driver(std::string* why) {
  static const Library opened;
  if (opened.missing.empty()) return &opened.driver;
  *why = opened.missing;
  return nullptr;
}

std::string error_text(const Driver& driver, int error) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.error_name(error, &name) != 0 || name == nullptr) name = "CUDA_ERROR_UNKNOWN";
  if (driver.error_text(error, &text) != 0 || text == nullptr) text = "no text";
  return std::string(name) + " (" + text + ")";
}

Status check(const Driver& driver, int error, const std::string& what) {
  if (error == 0) return Status();
  return Status::error(Code::kTransport,
                       "the CUDA driver cannot " + what + ": " + error_text(driver, error));
}

std::string driver_summary(const Driver& driver) {
  if (const int error = driver.init(0); error != 0)
    return describe_failure(driver, "cuInit", error);
  int version = 0;
  int count = 0;
  if (const int error = driver.driver_version(&version); error != 0) {
    return describe_failure(driver, "cuDriverGetVersion", error);
  }
  if (const int error = driver.device_count(&count); error != 0) {
    return describe_failure(driver, "cuDeviceGetCount", error);
  }
  std::string text = "driver " + std::to_string(version / 1000) + "." +
                     std::to_string(version % 1000 / 10) + ", " + std::to_string(count) +
                     (count == 1 ? " device" : " devices");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    text += (ordinal == 0 ? ": " : ", ") + describe(driver, ordinal);
  }
  return text + describe_links(driver, count);
}

std::string driver_summary() {
  std::string why;
  const Driver* opened = driver(&why);
  return opened == nullptr ? why : driver_summary(*opened);
}

}  // namespace pycoll::device
