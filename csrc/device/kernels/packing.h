// Device code: copies elements that are not in C order to C order and back. All blocks of the
// launch share the elements; no block waits for another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels/local.h"
#include "device/kernels/memory.h"
#include "device/kernels/program.h"
#include "device/kernels/wire_elements.h"

namespace pycoll::device {

// Bytes from element 0 to element `index` in C order.
PYCOLL_DEVICE std::int64_t offset_of(const Copy& copy, std::uint64_t index) {
  std::int64_t offset = 0;
  PYCOLL_NO_UNROLL
  for (std::uint32_t axis = copy.axes; axis-- > 0 && index != 0;) {
    const std::uint64_t length = copy.lengths[axis];
    offset += static_cast<std::int64_t>(index % length) * copy.strides[axis];
    index /= length;
  }
  return offset;
}

PYCOLL_DEVICE void convert(const Copy& copy, std::byte* wire, std::byte* element) {
  if (copy.kind == Copy::Kind::kEnter) {
    const Pack stored = load_bytes(element, copy.item_bytes);
    store_bytes(wire, make_wire_element(copy.dtype, copy.op, copy.ranks, stored), copy.wire_bytes);
  } else {
    const Pack found = load_bytes(wire, copy.wire_bytes);
    store_bytes(element, make_element(copy.dtype, copy.op, copy.ranks, found), copy.item_bytes);
  }
}

PYCOLL_DEVICE void run_copy(const Copy& copy) {
  const std::uint64_t step = std::uint64_t{copy.blocks} * threads();
  for (std::uint64_t index = std::uint64_t{block()} * threads() + thread(); index < copy.count;
       index += step) {
    std::byte* packed = copy.packed + index * copy.item_bytes;
    if (copy.kind == Copy::Kind::kFill) {
      store_bytes(packed, copy.value, copy.item_bytes);
      continue;
    }
    std::byte* strided = copy.strided + offset_of(copy, index);
    if (copy.kind == Copy::Kind::kEnter || copy.kind == Copy::Kind::kLeave) {
      convert(copy, copy.packed + index * copy.wire_bytes, strided);
      continue;
    }
    const bool packs = copy.kind == Copy::Kind::kPack;
    const Pack element = load_bytes(packs ? strided : packed, copy.item_bytes);
    store_bytes(packs ? packed : strided, element, copy.item_bytes);
  }
}

}  // namespace pycoll::device
