// Functions that the readers of array protocols share. Private to the bindings.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "bindings/arrays/buffer_view.h"

namespace pycoll::bindings {

enum class Kind : std::uint8_t { kBool, kSigned, kUnsigned, kFloat, kComplex };

// The type of that kind and size; nullopt if pycoll has none. Never finds bfloat16 and the 8-bit
// floats: their names or codes identify them.
[[nodiscard]] std::optional<DType> find_dtype(Kind kind, std::size_t item);

// These throw InvalidArgumentError about the argument `name`.
[[noreturn]] void refuse(std::string_view name, const std::string& what);
[[noreturn]] void refuse_dtype(std::string_view name, const std::string& dtype);
[[noreturn]] void refuse_byte_order(std::string_view name, const std::string& dtype);

std::string text_of(pybind11::handle object);

// Sets the strides of C order, for exporters that give none. Requires: dtype and shape.
void assume_c_order(BufferView& view);

// Fills in the fields that follow from dtype, shape and strides.
void measure(BufferView& view, const std::byte* data, std::string_view name);

}  // namespace pycoll::bindings
