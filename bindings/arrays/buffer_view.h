// The common form in which arrays of all frameworks reach the engines.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"

namespace pycoll::bindings {

// Host memory of an exporter: a NumPy array, a DLPack producer, or an object with the buffer
// protocol. The exporter stays alive and its memory in place as long as any copy of the view
// exists. Copies share the exporter. Create, copy and destroy a view with the GIL held; `data`,
// `count` and `dtype` may be read without it.
struct BufferView {
  std::byte* data = nullptr;  // element 0, of any alignment; never written if !writable
  std::uint64_t count = 0;    // elements
  DType dtype = DType::kUInt8;
  std::vector<pybind11::ssize_t> shape;    // empty for 0-d
  std::vector<pybind11::ssize_t> strides;  // bytes, one per axis; may be negative
  bool contiguous = true;                  // C order without gaps; also if count is 0
  bool writable = false;
  std::string device = "cpu";
  // Bytes from the lowest address of an element to the end of the highest: the memory that `data`
  // may touch if not contiguous. Equals count * item if contiguous.
  const std::byte* low = nullptr;
  std::uint64_t extent = 0;
  std::shared_ptr<void> owner;  // releases the exporter

  std::uint64_t bytes() const { return count * item_bytes(dtype); }
};

}  // namespace pycoll::bindings
