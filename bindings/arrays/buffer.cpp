// Converts an array to a BufferView, by the first of these that the object supports: NumPy's
// memory, a DLPack capsule, the buffer protocol.
#include "bindings/arrays/buffer.h"

#include <pybind11/numpy.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "bindings/arrays/exporters.h"
#include "bindings/arrays/flat.h"
#include "bindings/core/bind.h"

namespace pycoll::bindings {
namespace {

struct Known {
  DType dtype;
  Kind kind;
};
// Types that kind and size identify; bfloat16 and the 8-bit floats are identified by name or code.
constexpr Known kKnown[] = {
    {DType::kBool, Kind::kBool},         {DType::kInt8, Kind::kSigned},
    {DType::kInt16, Kind::kSigned},      {DType::kInt32, Kind::kSigned},
    {DType::kInt64, Kind::kSigned},      {DType::kUInt8, Kind::kUnsigned},
    {DType::kUInt16, Kind::kUnsigned},   {DType::kUInt32, Kind::kUnsigned},
    {DType::kUInt64, Kind::kUnsigned},   {DType::kFloat16, Kind::kFloat},
    {DType::kFloat32, Kind::kFloat},     {DType::kFloat64, Kind::kFloat},
    {DType::kComplex64, Kind::kComplex}, {DType::kComplex128, Kind::kComplex},
};

std::string list_supported() {
  std::string text;
  for (int value = 0; value < kDTypeCount; ++value) {
    if (value != 0) text += ", ";
    text += name_of(static_cast<DType>(value));
  }
  return text;
}

}  // namespace

std::optional<DType> find_dtype(Kind kind, std::size_t item) {
  for (const Known& known : kKnown) {
    if (known.kind == kind && item_bytes(known.dtype) == item) return known.dtype;
  }
  return std::nullopt;
}

void refuse(std::string_view name, const std::string& what) {
  raise_if_failed(Status::error(Code::kInvalidArgument, std::string(name) + " " + what), "");
  throw py::error_already_set();
}

void refuse_dtype(std::string_view name, const std::string& dtype) {
  refuse(name, "has dtype " + dtype + ", which pycoll cannot move; it moves " + list_supported());
}

void refuse_byte_order(std::string_view name, const std::string& dtype) {
  refuse(name, "has dtype " + dtype +
                   " in foreign byte order; convert it first, for example with "
                   "x.astype(x.dtype.newbyteorder('='))");
}

std::string text_of(py::handle object) { return py::str(object).cast<std::string>(); }

void assume_c_order(BufferView& view) {
  view.strides.resize(view.shape.size());
  auto stride = static_cast<py::ssize_t>(item_bytes(view.dtype));
  for (std::size_t axis = view.shape.size(); axis-- > 0; stride *= view.shape[axis]) {
    view.strides[axis] = stride;
  }
}

void measure(BufferView& view, const std::byte* data, std::string_view name) {
  view.data = const_cast<std::byte*>(data);
  view.count = 1;
  for (const py::ssize_t length : view.shape) {
    if (length < 0) refuse(name, "has a negative dimension");
    view.count *= static_cast<std::uint64_t>(length);
  }
  view.low = data;
  view.extent = view.bytes();
  if (view.count == 0) return;
  const auto item = static_cast<py::ssize_t>(item_bytes(view.dtype));
  py::ssize_t expected = item;
  py::ssize_t below = 0;
  py::ssize_t above = item;
  for (std::size_t axis = view.shape.size(); axis-- > 0;) {
    const py::ssize_t length = view.shape[axis];
    if (length == 1) continue;
    if (view.strides[axis] != expected) view.contiguous = false;
    expected *= length;
    const py::ssize_t reach = (length - 1) * view.strides[axis];
    (reach < 0 ? below : above) += reach;
  }
  view.low = data + below;
  view.extent = static_cast<std::uint64_t>(above - below);
}

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
