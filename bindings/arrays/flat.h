// The fast reader of arrays: contiguous memory of the common kinds of arrays, read without a call
// of Python or an allocation. BufferView reads all other arrays. Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "transport/transport.h"

namespace pycoll::bindings {

// Valid while the array lives and is not changed. Holds no reference.
struct ContiguousView {
  std::byte* data = nullptr;
  std::uint64_t count = 0;  // elements
  DType dtype = DType::kUInt8;
  bool writable = false;
  int ndim = 0;
  const pybind11::ssize_t* shape = nullptr;  // owned by the array

  std::uint64_t bytes() const { return count * item_bytes(dtype); }
  std::uint64_t shape_key() const { return transport::shape_key(ndim, shape); }
};

// Reads an array whose elements lie in host memory in C order without gaps. It must be a NumPy
// array (no subclass) of a dtype that was seen before, or a tensor of a class that learn_tensor()
// knows. False for all other objects, without an error set.
[[nodiscard]] bool flatten(PyObject* x, ContiguousView* flat);

// Whether x is a tensor of a known class that requires grad, in a thread that records gradients. A
// new result would lose the gradients.
bool records_gradients(PyObject* x);

// Makes a new array of the kind of `like`, for the result of an operation. Returns a new
// reference, and its memory in `flat`. Requires: flatten(like) succeeded, with this dtype if it
// is a tensor; or `like` is nullptr, for NumPy. nullptr without an error set if the array
// cannot be made this way.
[[nodiscard]] PyObject* make_flat(PyObject* like, DType dtype, int ndim,
                                  const pybind11::ssize_t* shape, ContiguousView* flat);

// Records NumPy's number for a dtype, as found by the full reader.
void learn_number(int number, DType dtype);

void bind_flat(pybind11::module_& module);

}  // namespace pycoll::bindings
