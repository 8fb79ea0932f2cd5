// What the ways of reading an array share. Private to the bindings.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "bindings/buffer.h"
#include "bindings/dlpack.h"

namespace pycoll::bindings {

enum class Kind : std::uint8_t { kBool, kSigned, kUnsigned, kFloat, kComplex };

// The type of that kind and size; none for sizes that we do not have. bfloat16 and the 8-bit floats
// are never found: name or code tells them.
[[nodiscard]] std::optional<DType> find_dtype(Kind kind, std::size_t item);
// The type that DLPack calls so.
[[nodiscard]] std::optional<DType> find_dtype(const dlpack::DataType& dtype);

// These throw InvalidArgumentError about the argument `name`.
[[noreturn]] void refuse(std::string_view name, const std::string& what);
[[noreturn]] void refuse_dtype(std::string_view name, const std::string& dtype);
[[noreturn]] void refuse_byte_order(std::string_view name, const std::string& dtype);

std::string text_of(pybind11::handle object);

// Strides of C order, for exporters that tell none. Requires: dtype and shape.
void assume_c_order(BufferView& view);

// Fills in what follows from dtype, shape and strides.
void measure(BufferView& view, const std::byte* data, std::string_view name);

// By x.__dlpack__(), or from the capsule that it gave. The capsule is spent afterwards.
BufferView from_dlpack(pybind11::handle x, std::string_view name);
// What a capsule says of memory on a CUDA device: (address, shape, strides in bytes or None, dtype,
// writable, owner, ordinal). The capsule is spent afterwards.
pybind11::tuple device_tensor(pybind11::handle capsule, std::string_view name);
BufferView from_capsule(pybind11::handle capsule, std::string_view name);

}  // namespace pycoll::bindings
