// Copies between strided arrays and contiguous memory: packs inputs that have gaps, and packs many
// small arrays into one buffer for one message.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

#include "bindings/arrays/buffer_view.h"

namespace pycoll::bindings {

// gather_elements() copies the elements of `view` in C order to `target`, which has
// view.bytes() bytes. scatter_elements() copies them back. Requires: target does not overlap
// the view. Neither needs the GIL.
void gather_elements(const BufferView& view, std::byte* target);
void scatter_elements(const std::byte* source, const BufferView& view);

void bind_packing(pybind11::module_& module);

}  // namespace pycoll::bindings
