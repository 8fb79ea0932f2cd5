#include "device/driver.h"

#include <dlfcn.h>

namespace pycoll::device {
namespace {

// Of CUdevice_attribute, fixed since CUDA 5.
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

struct Library {
  Driver driver{};
  std::string missing;  // why the table is of no use; empty if it is
};

template <typename Function>
void find(void* library, const char* name, Function*& entry, std::string& missing) {
  entry = reinterpret_cast<Function*>(::dlsym(library, name));
  if (entry == nullptr && missing.empty()) {
    missing = std::string("libcuda.so.1 has no ") + name + "; install a newer NVIDIA driver";
  }
}

Library open_library() {
  Library opened;
  // Never closed: the driver keeps threads of its own.
  void* handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = ::dlerror();
    opened.missing = std::string("libcuda.so.1 cannot be opened (") +
                     (error != nullptr ? error : "no reason given") +
                     "); it comes with the NVIDIA driver";
    return opened;
  }
  Driver& driver = opened.driver;
  const auto get = [&](const char* name, auto& entry) {
    find(handle, name, entry, opened.missing);
  };
  get("cuInit", driver.init);
  get("cuDriverGetVersion", driver.driver_version);
  get("cuDeviceGetCount", driver.device_count);
  get("cuDeviceGet", driver.device_get);
  get("cuDeviceGetName", driver.device_name);
  get("cuDeviceGetAttribute", driver.device_attribute);
  get("cuGetErrorString", driver.error_text);
  return opened;
}

std::string failed(const Driver& driver, const char* what, int error) {
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
                     driver.device_attribute(&major, kComputeCapabilityMajor, device) == 0 &&
                     driver.device_attribute(&minor, kComputeCapabilityMinor, device) == 0;
  if (!known) return std::to_string(ordinal) + " unknown";
  return std::to_string(ordinal) + " " + name + " (sm_" + std::to_string(major) +
         std::to_string(minor) + ")";
}

}  // namespace

const Driver* driver(std::string* why) {
  static const Library opened = open_library();
  if (opened.missing.empty()) return &opened.driver;
  *why = opened.missing;
  return nullptr;
}

std::string driver_summary(const Driver& driver) {
  if (const int error = driver.init(0); error != 0) return failed(driver, "cuInit", error);
  int version = 0;
  int count = 0;
  if (const int error = driver.driver_version(&version); error != 0) {
    return failed(driver, "cuDriverGetVersion", error);
  }
  if (const int error = driver.device_count(&count); error != 0) {
    return failed(driver, "cuDeviceGetCount", error);
  }
  std::string text = "driver " + std::to_string(version / 1000) + "." +
                     std::to_string(version % 1000 / 10) + ", " + std::to_string(count) +
                     (count == 1 ? " device" : " devices");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    text += (ordinal == 0 ? ": " : ", ") + describe(driver, ordinal);
  }
  return text;
}

std::string driver_summary() {
  std::string why;
  const Driver* opened = driver(&why);
  return opened == nullptr ? why : driver_summary(*opened);
}

}  // namespace pycoll::device
