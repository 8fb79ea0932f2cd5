// The steps of codecs on a device, and the numbers of its kernels, as Python names them.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "device/driver/streams.h"

namespace pycoll::bindings {

namespace py = pybind11;

// Reads a step of a codec; nothing for a copy. After its name a tuple has the _core.Codec, the
// address of the codes, the bytes from one part or row of them to the next, and the values of all
// parts. Then follow, with 0 for no memory (see device/kernels/codes/coding.h):
//
//   "encode"  values, type, rests, parts, the part to leave out or -1, chunk of part 0, rank
//   "fold"    values of the own row, type, result, type, rows, own row, divisor
//   "decode"  result, type, parts
//   "correct" values, type, result, factor
std::optional<device::Coding> coding_of(const py::tuple& words);

// Reads a step that chooses or adds up values (device/kernels/codes/sparse_coding.h); nothing for
// other steps. After its name a tuple has the phase, the address of the codes, and their number:
//
//   "count", "tally", "gather"  values, type, rests, masks, work, values of the array
//   "check"                     rank of the codes, work, values of the array
//   "spread"                    result, work, values of the array
std::optional<device::SparseCoding> sparse_coding_of(const py::tuple& words);

// Numbers of the kernels: DEVICE_PARTS_MAX, DEVICE_KEY_DIGITS and the like.
void bind_limits(py::module_& module);

}  // namespace pycoll::bindings
