// Converts an array to a BufferView, by the first of these that the object supports: NumPy's
// memory, a DLPack capsule, the buffer protocol.
#include "bindings/arrays/buffer.h"

#include <pybind11/numpy.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "bindings/arrays/array_packing.h"
#include "bindings/arrays/dlpack_reader.h"
#include "bindings/arrays/exporters.h"
#include "bindings/arrays/flat.h"

namespace pycoll::bindings {

namespace py = pybind11;

namespace {

// ---- NumPy

std::optional<DType> extension_dtype(const std::string& name) {
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float8_e4m3fn") return DType::kFloat8E4M3;
  if (name == "float8_e5m2") return DType::kFloat8E5M2;
  return std::nullopt;
}

DType numpy_dtype(const py::dtype& dtype, std::string_view name) {
  constexpr int kFirstExtension = 256;
  std::optional<DType> found;
  if (dtype.num() >= kFirstExtension) {
    // Numbers of extension types are assigned once per process; guarded by the GIL.
    static std::unordered_map<int, DType> extensions;
    const auto known = extensions.find(dtype.num());
    if (known != extensions.end()) return known->second;
    found = extension_dtype(text_of(dtype.attr("name")));
    if (found) extensions.emplace(dtype.num(), *found);
  } else {
    const auto item = static_cast<std::size_t>(dtype.itemsize());
    switch (dtype.kind()) {
      case 'b':
        found = DType::kBool;
        break;
      case 'i':
        found = find_dtype(Kind::kSigned, item);
        break;
      case 'u':
        found = find_dtype(Kind::kUnsigned, item);
        break;
      case 'f':
        found = find_dtype(Kind::kFloat, item);
        break;
      case 'c':
        found = find_dtype(Kind::kComplex, item);
        break;
      default:
        break;
    }
  }
  if (!found) refuse_dtype(name, text_of(dtype));
  if (dtype.byteorder() == '>') refuse_byte_order(name, text_of(dtype));
  learn_number(dtype.num(), *found);
  return *found;
}

BufferView from_numpy(const py::array& array, std::string_view name) {
  BufferView view;
  view.dtype = numpy_dtype(array.dtype(), name);
  view.shape.assign(array.shape(), array.shape() + array.ndim());
  view.strides.assign(array.strides(), array.strides() + array.ndim());
  view.writable = array.writeable();
  measure(view, static_cast<const std::byte*>(array.data()), name);
  view.owner = std::shared_ptr<void>(
      array.inc_ref().ptr(), [](void* object) { Py_DECREF(static_cast<PyObject*>(object)); });
  return view;
}

// ---- Buffer protocol

std::optional<Kind> kind_of(std::string_view code) {
  if (code.size() == 2 && code[0] == 'Z' && (code[1] == 'f' || code[1] == 'd')) {
    return Kind::kComplex;
  }
  if (code.size() != 1) return std::nullopt;
  constexpr std::pair<std::string_view, Kind> kCodes[] = {
      {"?", Kind::kBool},    {"bhilqn", Kind::kSigned}, {"BHILQNc", Kind::kUnsigned},
      {"efd", Kind::kFloat}, {"FD", Kind::kComplex},
  };
  for (const auto& [codes, kind] : kCodes) {
    if (codes.find(code[0]) != std::string_view::npos) return kind;
  }
  return std::nullopt;
}

// `format` follows Python's struct module, with NumPy's Z for complex numbers.
DType format_dtype(const char* format, py::ssize_t item, std::string_view name) {
  const std::string_view whole = format == nullptr ? "B" : format;
  std::string_view code = whole;
  bool foreign = false;
  if (!code.empty() && std::string_view("@=<>!").find(code[0]) != std::string_view::npos) {
    foreign = (code[0] == '>' || code[0] == '!') && item > 1;
    code.remove_prefix(1);
  }
  const std::string shown = "'" + std::string(whole) + "'";
  const std::optional<Kind> kind = kind_of(code);
  const std::optional<DType> found =
      kind ? find_dtype(*kind, static_cast<std::size_t>(item)) : std::nullopt;
  if (!found) refuse_dtype(name, shown + " (a buffer's format)");
  if (foreign) refuse_byte_order(name, shown + " (a buffer's format)");
  return *found;
}

BufferView from_buffer(py::handle x, std::string_view name) {
  auto buffer = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(x.ptr(), buffer.get(), PyBUF_RECORDS_RO) != 0) {
    const py::error_already_set error;
    refuse(name, "does not export its memory: " + text_of(error.value()));
  }
  BufferView view;
  view.owner = std::shared_ptr<void>(buffer.release(), [](void* object) {
    auto* held = static_cast<Py_buffer*>(object);
    PyBuffer_Release(held);
    delete held;
  });
  const auto& held = *static_cast<const Py_buffer*>(view.owner.get());
  view.dtype = format_dtype(held.format, held.itemsize, name);
  view.shape.assign(held.shape, held.shape + held.ndim);
  // ctypes gives no strides, even if asked.
  if (held.strides == nullptr) {
    assume_c_order(view);
  } else {
    view.strides.assign(held.strides, held.strides + held.ndim);
  }
  view.writable = held.readonly == 0;
  measure(view, static_cast<const std::byte*>(held.buf), name);
  return view;
}

// 0: no common byte; 1: exactly the same memory; 2: partly the same.
int overlap(const BufferView& one, const BufferView& other) {
  if (one.extent == 0 || other.extent == 0) return 0;
  const bool apart = one.low + one.extent <= other.low || other.low + other.extent <= one.low;
  if (apart) return 0;
  const bool same =
      one.data == other.data && one.bytes() == other.bytes() && one.contiguous && other.contiguous;
  return same ? 1 : 2;
}

// Whether `part` is contiguous memory of `whole` that begins at byte `place`.
bool is_part(const BufferView& part, const BufferView& whole, std::uint64_t place) {
  return part.contiguous && whole.contiguous && part.bytes() <= whole.bytes() &&
         part.data == whole.data + place;
}

py::tuple shape_of(const BufferView& view) {
  py::tuple shape(view.shape.size());
  for (std::size_t axis = 0; axis < view.shape.size(); ++axis) shape[axis] = view.shape[axis];
  return shape;
}

}  // namespace

BufferView make_view(py::handle x, std::string_view name) {
  if (PyCapsule_CheckExact(x.ptr())) return from_capsule(x, name);
  if (py::hasattr(x, "__dlpack__")) {
    // Asked only here, because pybind11's first check has to find and import NumPy, which is slow.
    const bool numpy = py::isinstance<py::array>(x);
    return numpy ? from_numpy(py::reinterpret_borrow<py::array>(x), name) : from_dlpack(x, name);
  }
  if (PyObject_CheckBuffer(x.ptr()) != 0) return from_buffer(x, name);
  refuse(name, "is " + text_of(py::repr(py::type::of(x))) +
                   ", which is no array: pass a NumPy array, a torch or JAX array, or any object "
                   "with DLPack or the buffer protocol");
}

void bind_buffer(py::module_& module) {
  py::class_<BufferView>(module, "BufferView", "Memory of an array, kept alive by this object.")
      .def_property_readonly("dtype",
                             [](const BufferView& view) { return static_cast<int>(view.dtype); })
      .def_property_readonly("shape", &shape_of)
      .def_readonly("count", &BufferView::count)
      .def_property_readonly("nbytes", &BufferView::bytes)
      .def_readonly("contiguous", &BufferView::contiguous)
      .def_readonly("writable", &BufferView::writable)
      .def_readonly("device", &BufferView::device)
      .def("overlap", &overlap, py::arg("other"),
           "0: no byte in common; 1: exactly the same memory; 2: partly the same.")
      .def("is_part", &is_part, py::arg("whole"), py::arg("place"),
           "Whether it is the part of `whole` that begins at its byte `place`.");
  module.def("view", &make_view, py::arg("x"), py::arg("name") = "x",
             "The memory that `x` exports. Raises InvalidArgumentError naming the argument.");
  bind_packing(module);
}

}  // namespace pycoll::bindings
