// Host staging of messages of device arrays, and the packing copies of device operations.
#pragma once

#include <pybind11/pybind11.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "device/driver/driver.h"
#include "device/driver/streams.h"

namespace pycoll::bindings {

namespace py = pybind11;

inline device::StreamHandle stream_of(std::uintptr_t handle) {
  return std::bit_cast<device::StreamHandle>(handle);
}

// Returns the initialized driver; throws InvalidArgumentError about the argument
// `name` if there is none.
const device::Driver& need_driver(const std::string& name);

// Converts tuples to steps. A copy is ("pack" or "unpack", packed, item bytes, strided, lengths,
// strides), where packed and strided are addresses; or ("fill", packed, item bytes, count, value).
// device_codes.h reads the others.
device::Copies copies_of(const std::vector<py::tuple>& before, const std::vector<py::tuple>& after);

// DeviceStaging.
void bind_staging(py::module_& module);

}  // namespace pycoll::bindings
