// Reads arrays through DLPack capsules.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string_view>

#include "bindings/arrays/buffer_view.h"
#include "bindings/arrays/dlpack.h"

namespace pycoll::bindings {

// The type for a DLPack code; nullopt if pycoll has none.
[[nodiscard]] std::optional<DType> find_dtype(const dlpack::DataType& dtype);

// Reads x.__dlpack__(), or a capsule that it returned. Consumes the capsule.
BufferView from_dlpack(pybind11::handle x, std::string_view name);
// Describes memory on a CUDA device from a capsule: (address, shape, strides in bytes or None,
// dtype, writable, owner, ordinal). Consumes the capsule.
pybind11::tuple device_tensor(pybind11::handle capsule, std::string_view name);
BufferView from_capsule(pybind11::handle capsule, std::string_view name);

}  // namespace pycoll::bindings
