#include "bindings/engine/request.h"

#include <pybind11/stl.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "bindings/engine/plan.h"
#include "bindings/kernels/codec.h"
#include "kernels/dispatch.h"
#include "plan/layout.h"

namespace pycoll::bindings {
namespace {

void check_code(const char* name, int value, int count) {
  if (value >= 0 && value < count) return;
  throw py::value_error(std::string(name) + " is " + std::to_string(value) +
                        ": expected a number from 0 to " + std::to_string(count - 1));
}

// `counts`: elements of each block (csrc/plan/FORMAT.md). `arrays`: of the call, for error texts.
RequestHandle make_request(const PlanHandle& plan, int dtype, int op,
                           std::vector<std::uint64_t> counts, std::uint64_t plan_key,
                           std::uint32_t segment_bytes, std::shared_ptr<UserOp> user_op,
                           std::shared_ptr<executor::CallArrays> arrays, const BoundCodec* codec) {
  check_code("dtype", dtype, kDTypeCount);
  check_code("op", op, kReduceOpCount);
  const plan::Header& header = plan.image->header();
  executor::CollectiveRequest request;
  request.plan = plan.image;
  request.counts = std::move(counts);
  request.segment_bytes = segment_bytes;
  transport::Descriptor& descriptor = request.descriptor;
  descriptor.count =
      std::accumulate(request.counts.begin(), request.counts.end(), std::uint64_t{0});
  descriptor.plan_key = plan_key;
  descriptor.root = header.root;
  descriptor.collective = static_cast<Collective>(header.collective);
  descriptor.dtype = static_cast<DType>(dtype);
  descriptor.op = static_cast<ReduceOp>(op);
  request.arrays = std::move(arrays);
  if (codec != nullptr) {
    request.codec = codec->codec;
    descriptor.codec = kernels::code_of(codec->codec);
  }
  if (user_op != nullptr) {
    request.combine = user_op->combine();
    request.reduction_failed = user_op->failure_flag();
  } else {
    const bool averages = descriptor.op == ReduceOp::kAvg;
    // The average of one rank's array is the array itself.
    if (!averages || plan::workers(header) > 1) {
      request.form = kernels::wire_form(descriptor.dtype, descriptor.op);
    }
    request.combine = kernels::combine_for(descriptor.dtype, descriptor.op);
    if (averages && !request.form) request.scale = kernels::scale_for(descriptor.dtype);
  }
  return {std::move(request), std::move(user_op)};
}

}  // namespace

// The lengths come from the arrays' own types, so that a wrong type shows as a wrong number of
// bytes.
executor::CollectiveRequest with_memory(const RequestHandle& handle, const BufferView* input,
                                        const BufferView* output, const BufferView* residual) {
  executor::CollectiveRequest request = handle.request;
  if (input != nullptr) request.input = {input->data, input->bytes()};
  if (output != nullptr) request.output = {output->data, output->bytes()};
  if (residual != nullptr) {
    if (residual->dtype != DType::kFloat32 || !residual->contiguous || !residual->writable) {
      throw py::value_error("residual must be writable float32 in one piece");
    }
    request.residual = {residual->data, residual->bytes()};
  }
  return request;
}

void bind_requests(py::module_& module) {
  bind_user_op(module);
  py::class_<executor::CallArrays, std::shared_ptr<executor::CallArrays>>(
      module, "CallArrays", "The arrays of a call, list or group, in order, for error texts.")
      .def(py::init<>())
      .def(
          "add",
          [](executor::CallArrays& self, int dtype, int op,
             const std::vector<std::int64_t>& shape) {
            check_code("dtype", dtype, kDTypeCount);
            check_code("op", op, kReduceOpCount);
            self.add(static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                     static_cast<int>(shape.size()), shape.data());
          },
          py::arg("dtype"), py::arg("op"), py::arg("shape"))
      .def_property_readonly("key", &executor::CallArrays::key,
                             "A hash of all arrays; a part of the key of each message of a list.");
  py::class_<RequestHandle, std::shared_ptr<RequestHandle>>(
      module, "Request", "A collective with everything but its memory; immutable.")
      .def(py::init(&make_request), py::arg("plan"), py::kw_only(), py::arg("dtype"), py::arg("op"),
           py::arg("counts"), py::arg("plan_key"),
           py::arg("segment_bytes") = transport::kSegmentBytesMax, py::arg("user_op") = py::none(),
           py::arg("arrays") = py::none(), py::arg("codec") = py::none());
}

}  // namespace pycoll::bindings
