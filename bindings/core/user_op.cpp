#include "bindings/core/user_op.h"

#include <pybind11/numpy.h>

#include <cstring>
#include <utility>
#include <vector>

#include "bindings/core/gil.h"

namespace pycoll::bindings {

namespace py = pybind11;

namespace {

thread_local bool inside_reduction = false;

}  // namespace

class Inside {
 public:
  Inside() {
    inside_reduction = true;
    ++UserOp::inside_count;
  }
  ~Inside() {
    inside_reduction = false;
    --UserOp::inside_count;
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

bool UserOp::inside() { return inside_reduction; }

kernels::Combine UserOp::combine() { return {&UserOp::fold, this}; }

void UserOp::fold(void* target, const void* const* sources, int source_count, std::size_t count,
                  void* context) {
  auto& self = *static_cast<UserOp*>(context);
  ++entered_count;
  {
    const TakenGil gil;
    self.fold_with_gil(target, sources, source_count, count);
  }
  --entered_count;
}

void UserOp::fold_with_gil(void* target, const void* const* sources, int source_count,
                           std::size_t count) {
  if (failed_) return;
  const Inside inside;
  try {
    const py::dtype dtype(dtype_);
    const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(count)};
    // Folds in separate memory, because the target may be one of the sources.
    py::array result(dtype, shape);
    const std::size_t bytes = count * static_cast<std::size_t>(dtype.itemsize());
    std::memcpy(result.mutable_data(), sources[0], bytes);
    for (int i = 1; i < source_count; ++i) {
      py::array source(dtype, shape);
      std::memcpy(source.mutable_data(), sources[i], bytes);
      (void)call_python(function_, result, source);
    }
    std::memcpy(target, result.data(), bytes);
  } catch (const std::exception&) {
    error_ = std::current_exception();
    failed_ = true;
  }
}

void UserOp::rethrow() {
  if (error_ == nullptr) return;
  std::rethrow_exception(std::exchange(error_, nullptr));
}

void bind_user_op(py::module_& module) {
  py::class_<UserOp, std::shared_ptr<UserOp>>(module, "UserOp",
                                              "A reduction written in Python: f(target, source).")
      .def(py::init<py::object, py::object>(), py::arg("function"), py::arg("dtype"));
}

}  // namespace pycoll::bindings
