// The quick look at an array: contiguous memory of the kinds of arrays that most programs pass,
// read without a call of Python or an allocation. Whatever else there is, BufferView reads.
// Requires everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "transport/transport.h"

namespace pycoll::bindings {

// Valid while the array lives and nobody changes it. Holds nothing.
struct Flat {
  std::byte* data = nullptr;
  std::uint64_t count = 0;  // elements
  DType dtype = DType::kUInt8;
  bool writable = false;
  int ndim = 0;
  const pybind11::ssize_t* shape = nullptr;  // the array's own

  std::uint64_t bytes() const { return count * item_bytes(dtype); }
  std::uint64_t shape_key() const { return transport::shape_key(ndim, shape); }
};

// True for a NumPy array (no subclass) of a dtype that was met before, or a tensor of a class that
// learn_tensor() took, if its elements lie in host memory in C order without gaps. False for all
// else, without an error set.
[[nodiscard]] bool flatten(PyObject* x, Flat* flat);

// Whether x is a tensor of a learned class that requires grad, in a thread that records gradients:
// a new result would lose them.
bool records_gradients(PyObject* x);

// Whether both have the same axes.
bool same_shape(const Flat& one, int ndim, const pybind11::ssize_t* shape);

// A new array of the kind of `like`, as the result of an operation; a new reference, and its memory
// in `flat`. Requires: flatten(like) succeeded, and gave this dtype if it is a tensor; or `like` is
// nullptr, for NumPy. nullptr without an error set where it cannot be
// made this way.
[[nodiscard]] PyObject* make_flat(PyObject* like, DType dtype, int ndim,
                                  const pybind11::ssize_t* shape, Flat* flat);

// The number that NumPy has for a dtype; told by who has looked closely.
void learn_number(int number, DType dtype);

void bind_flat(pybind11::module_& module);

}  // namespace pycoll::bindings
