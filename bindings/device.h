// What the bindings of devices share.
#pragma once

#include <pybind11/pybind11.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "device/driver.h"
#include "device/streams.h"

namespace pycoll::bindings {

namespace py = pybind11;

inline device::StreamHandle stream_of(std::uintptr_t handle) {
  return std::bit_cast<device::StreamHandle>(handle);
}

// The driver, started; throws InvalidArgumentError about the argument `name` where there is none.
const device::Driver& need_driver(const std::string& name);

// From ("pack" or "unpack", packed, item bytes, strided, lengths, strides), addresses and bytes; or
// from ("fill", packed, item bytes, count, value).
device::Copies copies_of(const std::vector<py::tuple>& before, const std::vector<py::tuple>& after);

// DeviceStaging.
void bind_staging(py::module_& module);

}  // namespace pycoll::bindings
