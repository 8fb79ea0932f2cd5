#include "bindings/arrays/exporters.h"

#include "bindings/core/errors.h"

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

}  // namespace pycoll::bindings
