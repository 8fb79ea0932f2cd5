// A wire form: the representation in which elements travel if their own dtype is unsuitable. The
// table of all forms is in wire.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace pycoll::kernels {

// Convert `groups` groups of array elements to wire elements, and back. The two ranges must not
// overlap. No alignment is required.
// Requires: 2 <= ranks <= MEAN_RANKS_MAX of pycoll/types.py.
using EnterFunction = void (*)(void* wire, const void* array, std::size_t groups,
                               std::uint32_t ranks);
using LeaveFunction = void (*)(void* array, const void* wire, std::size_t groups,
                               std::uint32_t ranks);

// One group is `array_items` elements of the array and `wire_items` elements on the wire: 1 and 1,
// except for averages of 64-bit integers (1 and 2) and pairs (2 and 1).
struct WireForm {
  EnterFunction enter = nullptr;  // nullptr: there is no wire form
  LeaveFunction leave = nullptr;
  Combine combine;
  DType dtype = DType::kBool;  // has the size of a wire element; pairs travel as kComplex128
  std::uint8_t array_items = 1;
  std::uint8_t wire_items = 1;

  explicit operator bool() const { return enter != nullptr; }
};

}  // namespace pycoll::kernels
