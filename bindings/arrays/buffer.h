// Reads any array as a BufferView.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

#include "bindings/arrays/buffer_view.h"

namespace pycoll::bindings {

// Makes a view of the memory that `x` exports. `name` is the argument's name for error texts.
// Throws InvalidArgumentError of pycoll.errors for an object that exports no array, an
// unknown dtype, foreign byte order, and memory that the host cannot address; then no
// reference to `x` is kept.
BufferView make_view(pybind11::handle x, std::string_view name);

}  // namespace pycoll::bindings
