#include "bindings/arrays/flat.h"

#include <pybind11/numpy.h>

#include <array>

#include "bindings/arrays/dlpack_reader.h"
#include "bindings/core/gil.h"

namespace pycoll::bindings {

namespace py = pybind11;

namespace {

static_assert(sizeof(py::ssize_t) == sizeof(std::int64_t), "shapes are read in place");

// ---- NumPy

constexpr int kNumbersMax = 320;  // numbers of extension types begin at 256
constexpr std::int8_t kUnknown = -1;

struct NumPy {
  PyTypeObject* array = nullptr;  // nullptr before the first array was read
  std::array<std::int8_t, kNumbersMax> dtypes;
  std::array<PyObject*, kDTypeCount> canonical{};  // numpy.dtype by DType; made on first use

  NumPy() noexcept { dtypes.fill(kUnknown); }
};
NumPy numpy;

bool flatten_numpy(PyObject* x, ContiguousView* flat) {
  using Api = py::detail::npy_api;
  const auto* array = reinterpret_cast<const py::detail::PyArray_Proxy*>(x);
  const auto* dtype = reinterpret_cast<const py::detail::PyArrayDescr_Proxy*>(array->descr);
  if (dtype->type_num < 0 || dtype->type_num >= kNumbersMax || dtype->byteorder == '>') {
    return false;
  }
  const std::int8_t known = numpy.dtypes[static_cast<std::size_t>(dtype->type_num)];
  if (known == kUnknown || (array->flags & Api::NPY_ARRAY_C_CONTIGUOUS_) == 0) return false;
  flat->data = reinterpret_cast<std::byte*>(array->data);
  flat->dtype = static_cast<DType>(known);
  flat->writable = (array->flags & Api::NPY_ARRAY_WRITEABLE_) != 0;
  flat->ndim = array->nd;
  flat->shape = array->dimensions;
  flat->count = 1;
  for (int axis = 0; axis < array->nd; ++axis) {
    flat->count *= static_cast<std::uint64_t>(array->dimensions[axis]);
  }
  return true;
}

// The result of pycoll.types.numpy_dtype; borrowed, nullptr if NumPy has no such type.
PyObject* canonical_dtype(DType dtype) {
  PyObject*& known = numpy.canonical[static_cast<std::size_t>(dtype)];
  if (known == nullptr) {
    try {
      known = py::module_::import("pycoll.types")
                  .attr("numpy_dtype")(static_cast<int>(dtype))
                  .release()
                  .ptr();
    } catch (const py::error_already_set&) {
      return nullptr;
    }
  }
  return known;
}

PyObject* make_numpy(DType dtype, int ndim, const py::ssize_t* shape, ContiguousView* flat) {
  PyObject* descr = canonical_dtype(dtype);
  if (descr == nullptr) return nullptr;
  Py_INCREF(descr);  // NewFromDescr steals the reference
  PyObject* made = py::detail::npy_api::get().PyArray_NewFromDescr_(numpy.array, descr, ndim, shape,
                                                                    nullptr, nullptr, 0, nullptr);
  if (made == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* array = reinterpret_cast<const py::detail::PyArray_Proxy*>(made);
  flat->data = reinterpret_cast<std::byte*>(array->data);
  flat->ndim = array->nd;
  flat->shape = array->dimensions;
  return made;
}

// ---- Tensors with DLPack's exchange functions

struct TensorClass {
  PyTypeObject* type = nullptr;
  const dlpack::Exchange* exchange = nullptr;
  PyObject* is_neg = nullptr;  // methods of the class
  PyObject* is_conj = nullptr;
  const PyGetSetDef* requires_grad = nullptr;  // lives as long as the class
  PyObject* is_recording = nullptr;            // a function: whether this thread records gradients
};
std::array<TensorClass, 4> tensor_classes;

const TensorClass* tensor_class_of(PyTypeObject* type) {
  for (const TensorClass& one : tensor_classes) {
    if (one.type == type) return &one;
  }
  return nullptr;
}

// Whether method(x) is False. Conjugation and negation may be deferred, with the memory unchanged.
bool denies(PyObject* method, PyObject* x) {
  PyObject* arguments[] = {nullptr, x};
  PyObject* answer =
      call_python(method, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);
  return answer == Py_False;
}

bool is_plain(const TensorClass& known, PyObject* x, DType dtype) {
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return denies(known.is_neg, x) && (!complex || denies(known.is_conj, x));
}

bool in_c_order(const dlpack::Tensor& tensor, std::uint64_t count) {
  if (tensor.strides == nullptr || count == 0) return true;
  std::int64_t expected = 1;
  for (int axis = tensor.ndim; axis-- > 0;) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

bool flatten_tensor(const TensorClass& known, PyObject* x, ContiguousView* flat) {
  dlpack::Tensor tensor;
  if (known.exchange->view(x, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const std::optional<DType> dtype = find_dtype(tensor.dtype);
  if (tensor.device.type != dlpack::kCpu || !dtype) return false;
  flat->data = static_cast<std::byte*>(tensor.data);
  if (flat->data != nullptr) flat->data += tensor.byte_offset;
  flat->dtype = *dtype;
  flat->writable = true;
  flat->ndim = tensor.ndim;
  flat->shape = reinterpret_cast<const py::ssize_t*>(tensor.shape);
  flat->count = 1;
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    flat->count *= static_cast<std::uint64_t>(tensor.shape[axis]);
  }
  return in_c_order(tensor, flat->count) && is_plain(known, x, *dtype);
}

void forget_error(void* /*context*/, const char* /*kind*/, const char* /*message*/) {}

PyObject* make_tensor(const dlpack::Exchange& exchange, PyObject* like, int ndim,
                      const py::ssize_t* shape, ContiguousView* flat) {
  dlpack::Tensor prototype;
  if (exchange.view(like, &prototype) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  prototype.ndim = ndim;
  prototype.shape = const_cast<std::int64_t*>(reinterpret_cast<const std::int64_t*>(shape));
  prototype.strides = nullptr;
  dlpack::ManagedTensorVersioned* managed = nullptr;
  if (exchange.allocate(&prototype, &managed, nullptr, &forget_error) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  flat->data = static_cast<std::byte*>(managed->tensor.data);
  if (flat->data != nullptr) flat->data += managed->tensor.byte_offset;
  flat->ndim = ndim;
  flat->shape = shape;
  void* made = nullptr;
  if (exchange.give(managed, &made) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  return static_cast<PyObject*>(made);
}

// False if the class does not publish the functions, or in an unknown form.
bool learn_tensor(const py::type& type, const py::function& is_recording) {
  const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeName) == 0) return false;
  const auto* exchange = static_cast<const dlpack::Exchange*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeName));
  if (exchange->version.major != dlpack::kMajorVersion || exchange->view == nullptr) return false;
  py::object is_neg = py::getattr(type, "is_neg", py::none());
  py::object is_conj = py::getattr(type, "is_conj", py::none());
  const py::object requires_grad = py::getattr(type, "requires_grad", py::none());
  if (is_neg.is_none() || is_conj.is_none() ||
      !Py_IS_TYPE(requires_grad.ptr(), &PyGetSetDescr_Type)) {
    return false;
  }
  for (TensorClass& one : tensor_classes) {
    if (one.type != nullptr) continue;
    one = {reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()),
           exchange,
           is_neg.release().ptr(),
           is_conj.release().ptr(),
           reinterpret_cast<PyGetSetDescrObject*>(requires_grad.ptr())->d_getset,
           is_recording.inc_ref().ptr()};
    return true;
  }
  return false;
}

}  // namespace

void learn_number(int number, DType dtype) {
  if (numpy.array == nullptr) numpy.array = py::detail::npy_api::get().PyArray_Type_;
  if (number >= 0 && number < kNumbersMax) {
    numpy.dtypes[static_cast<std::size_t>(number)] = static_cast<std::int8_t>(dtype);
  }
}

bool flatten(PyObject* x, ContiguousView* flat) {
  if (Py_TYPE(x) == numpy.array) return flatten_numpy(x, flat);
  const TensorClass* known = tensor_class_of(Py_TYPE(x));
  return known != nullptr && flatten_tensor(*known, x, flat);
}

bool records_gradients(PyObject* x) {
  const TensorClass* known = tensor_class_of(Py_TYPE(x));
  if (known == nullptr) return false;
  PyObject* needed = known->requires_grad->get(x, known->requires_grad->closure);
  if (needed == nullptr) PyErr_Clear();
  Py_XDECREF(needed);
  if (needed == Py_False) return false;
  PyObject* recording = PyObject_CallNoArgs(known->is_recording);
  if (recording == nullptr) PyErr_Clear();
  Py_XDECREF(recording);
  return recording != Py_False;
}

PyObject* make_flat(PyObject* like, DType dtype, int ndim, const py::ssize_t* shape,
                    ContiguousView* flat) {
  flat->dtype = dtype;
  flat->writable = true;
  flat->count = 1;
  for (int axis = 0; axis < ndim; ++axis) flat->count *= static_cast<std::uint64_t>(shape[axis]);
  if (like == nullptr || Py_TYPE(like) == numpy.array) {
    return numpy.array == nullptr ? nullptr : make_numpy(dtype, ndim, shape, flat);
  }
  return make_tensor(*tensor_class_of(Py_TYPE(like))->exchange, like, ndim, shape, flat);
}

void bind_flat(py::module_& module) {
  module.def(
      "learn_tensor", &learn_tensor, py::arg("type"), py::arg("is_recording"),
      "Read tensors of this class through DLPack's C exchange functions from now on; False if "
      "it does not publish them. is_neg() is called for every tensor, is_conj() for complex "
      "ones. `is_recording()` tells whether this thread records gradients of tensors that "
      "require grad.");
}

}  // namespace pycoll::bindings
