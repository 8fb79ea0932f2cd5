// The CUDA driver, opened at run time: one extension works with and without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycoll::device {

// The functions of libcuda.so.1 that pycoll calls. Names and meanings are those of the cu*
// functions; handles are pointers or ints there too, and 0 is success. A test may fill one.
struct Driver {
  int (*init)(unsigned int flags);
  int (*driver_version)(int* version);
  int (*device_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char* name, int length, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*error_text)(int error, const char** text);
};

// Opened once per process and kept; nullptr with `why` if that fails. Any thread.
const Driver* driver(std::string* why);

// For users: "driver 13.0, 2 devices: 0 NVIDIA H200 (sm_90), ...", or why there is none.
std::string driver_summary();
// The same of a given driver.
std::string driver_summary(const Driver& driver);

}  // namespace pycoll::device
