// Reads arrays of other libraries from DLPack capsules of both versions.
#include "bindings/arrays/dlpack_reader.h"

#include <optional>

#include "bindings/arrays/exporters.h"

namespace pycoll::bindings {

namespace py = pybind11;

namespace {

std::string dlpack_text(const dlpack::DataType& dtype) {
  return "code " + std::to_string(dtype.code) + " with " + std::to_string(dtype.bits) +
         " bits and " + std::to_string(dtype.lanes) + " lane(s) in DLPack's numbering";
}

DType dlpack_dtype(const dlpack::DataType& dtype, std::string_view name) {
  const std::optional<DType> found = find_dtype(dtype);
  if (!found) refuse_dtype(name, dlpack_text(dtype));
  return *found;
}

bool host_addressable(std::int32_t device) {
  return device == dlpack::kCpu || device == dlpack::kCudaHost || device == dlpack::kRocmHost;
}

[[noreturn]] void refuse_device(std::string_view name, std::int32_t device) {
  refuse(name, "lives on a device (DLPack device type " + std::to_string(device) +
                   "); device arrays need a build with CUDA: pass a copy in host memory");
}

void read_tensor(BufferView& view, const dlpack::Tensor& tensor, std::string_view name) {
  if (!host_addressable(tensor.device.type)) refuse_device(name, tensor.device.type);
  view.dtype = dlpack_dtype(tensor.dtype, name);
  const auto ndim = static_cast<std::size_t>(tensor.ndim);
  view.shape.assign(tensor.shape, tensor.shape + ndim);
  if (tensor.strides == nullptr) {
    assume_c_order(view);
  } else {
    const auto item = static_cast<std::int64_t>(item_bytes(view.dtype));
    for (std::size_t axis = 0; axis < ndim; ++axis) {
      view.strides.push_back(tensor.strides[axis] * item);
    }
  }
  const auto* data = static_cast<const std::byte*>(tensor.data);
  if (data != nullptr) data += tensor.byte_offset;
  measure(view, data, name);
}

// Takes the tensor out of the capsule; from here on the view calls the deleter.
template <typename Managed>
Managed* take(py::handle capsule, const char* offered, const char* used) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), offered));
  if (managed == nullptr || PyCapsule_SetName(capsule.ptr(), used) != 0) {
    throw py::error_already_set();
  }
  return managed;
}

template <typename Managed>
std::shared_ptr<void> own(Managed* managed) {
  return std::shared_ptr<void>(managed, [](void* object) {
    auto* tensor = static_cast<Managed*>(object);
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  });
}

// Calls x.__dlpack__, with a version if the producer supports that argument. The device is checked
// first, because a producer on a device may refuse or start a copy.
py::object make_capsule(py::handle x, std::string_view name) {
  const py::object method = x.attr("__dlpack__");
  std::int32_t device = dlpack::kCpu;
  try {
    if (py::hasattr(x, "__dlpack_device__")) {
      const py::tuple where = x.attr("__dlpack_device__")();
      device = py::int_(where[0]).cast<std::int32_t>();
    }
    if (!host_addressable(device)) refuse_device(name, device);
    try {
      return method(py::arg("max_version") = py::make_tuple(dlpack::kMajorVersion, 0));
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
    }
    return method();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception) || !host_addressable(device)) throw;
    refuse(name, "cannot be exported through DLPack: " + text_of(error.value()));
  }
}

}  // namespace

std::optional<DType> find_dtype(const dlpack::DataType& dtype) {
  using dlpack::TypeCode;
  if (dtype.lanes != 1 || dtype.bits % 8 != 0) return std::nullopt;
  const std::size_t item = dtype.bits / 8;
  switch (static_cast<TypeCode>(dtype.code)) {
    case TypeCode::kInt:
      return find_dtype(Kind::kSigned, item);
    case TypeCode::kUInt:
      return find_dtype(Kind::kUnsigned, item);
    case TypeCode::kFloat:
      return find_dtype(Kind::kFloat, item);
    case TypeCode::kBFloat:
      if (item == 2) return DType::kBFloat16;
      break;
    case TypeCode::kComplex:
      return find_dtype(Kind::kComplex, item);
    case TypeCode::kBool:
      return find_dtype(Kind::kBool, item);
    case TypeCode::kFloat8E4M3FN:
      if (item == 1) return DType::kFloat8E4M3;
      break;
    case TypeCode::kFloat8E5M2:
      if (item == 1) return DType::kFloat8E5M2;
      break;
  }
  return std::nullopt;
}

BufferView from_capsule(py::handle capsule, std::string_view name) {
  BufferView view;
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedName) != 0) {
    using Managed = dlpack::ManagedTensorVersioned;
    auto* managed = take<Managed>(capsule, dlpack::kVersionedName, dlpack::kVersionedUsedName);
    view.owner = own(managed);
    if (managed->version.major != dlpack::kMajorVersion) {
      refuse(name, "exports DLPack version " + std::to_string(managed->version.major) +
                       ", but pycoll reads version 1");
    }
    view.writable = (managed->flags & dlpack::kFlagReadOnly) == 0;
    read_tensor(view, managed->tensor, name);
    return view;
  }
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kPlainName) != 0) {
    using Managed = dlpack::ManagedTensor;
    auto* managed = take<Managed>(capsule, dlpack::kPlainName, dlpack::kPlainUsedName);
    view.owner = own(managed);
    view.writable = true;
    read_tensor(view, managed->tensor, name);
    return view;
  }
  refuse(name, "gave a DLPack capsule that is spent or of unknown kind");
}

BufferView from_dlpack(py::handle x, std::string_view name) {
  return from_capsule(make_capsule(x, name), name);
}

namespace {

// The arguments from which Python makes a DeviceView; the owner calls the tensor's deleter.
py::tuple facts_of(const dlpack::Tensor& tensor, const std::shared_ptr<void>& owner, bool writable,
                   std::string_view name) {
  if (tensor.device.type != dlpack::kCuda && tensor.device.type != dlpack::kCudaManaged) {
    refuse_device(name, tensor.device.type);
  }
  const DType dtype = dlpack_dtype(tensor.dtype, name);
  const auto item = static_cast<std::int64_t>(item_bytes(dtype));
  py::tuple shape(tensor.ndim);
  py::tuple strides(tensor.strides == nullptr ? 0 : tensor.ndim);
  for (py::ssize_t axis = 0; axis < tensor.ndim; ++axis) {
    shape[static_cast<std::size_t>(axis)] = tensor.shape[axis];
    if (tensor.strides != nullptr) {
      strides[static_cast<std::size_t>(axis)] = tensor.strides[axis] * item;
    }
  }
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  py::capsule keeper(new std::shared_ptr<void>(owner),
                     [](void* one) { delete static_cast<std::shared_ptr<void>*>(one); });
  return py::make_tuple(
      address == 0 ? 0 : address + tensor.byte_offset, shape,
      tensor.strides == nullptr ? py::object(py::none()) : py::object(std::move(strides)),
      static_cast<int>(dtype), writable, keeper, tensor.device.id);
}

}  // namespace

py::tuple device_tensor(py::handle capsule, std::string_view name) {
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedName) != 0) {
    using Managed = dlpack::ManagedTensorVersioned;
    auto* managed = take<Managed>(capsule, dlpack::kVersionedName, dlpack::kVersionedUsedName);
    const std::shared_ptr<void> owner = own(managed);
    if (managed->version.major != dlpack::kMajorVersion) {
      refuse(name, "exports DLPack version " + std::to_string(managed->version.major) +
                       ", but pycoll reads version 1");
    }
    return facts_of(managed->tensor, owner, (managed->flags & dlpack::kFlagReadOnly) == 0, name);
  }
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kPlainName) == 0) {
    refuse(name, "gave no DLPack capsule");
  }
  auto* managed = take<dlpack::ManagedTensor>(capsule, dlpack::kPlainName, dlpack::kPlainUsedName);
  const std::shared_ptr<void> owner = own(managed);
  return facts_of(managed->tensor, owner, true, name);
}

}  // namespace pycoll::bindings
