#include "bindings/calls/request.h"

#include <string>
#include <utility>

#include "plan/layout.h"

namespace pycoll::bindings {
namespace {

void check_code(const char* name, int value, int count) {
  if (value >= 0 && value < count) return;
  throw pybind11::value_error(std::string(name) + " is " + std::to_string(value) +
                              ": expected a number from 0 to " + std::to_string(count - 1));
}

}  // namespace

std::shared_ptr<const executor::CallArrays> one_array(const transport::Descriptor& descriptor,
                                                      int axes, const std::int64_t* lengths) {
  auto arrays = std::make_shared<executor::CallArrays>();
  arrays->add(descriptor.dtype, descriptor.op, axes, lengths);
  return arrays;
}

executor::CollectiveRequest make_request(const PlanHandle& plan, const BufferView* input,
                                         BufferView* output, Terms terms,
                                         const std::shared_ptr<UserOp>& user_op) {
  executor::CollectiveRequest request;
  request.plan = plan.image;
  check_code("dtype", terms.dtype, kDTypeCount);
  check_code("op", terms.op, kReduceOpCount);
  const auto dtype = static_cast<DType>(terms.dtype);
  // Uses the arrays' own types, so that a wrong type shows as a wrong number of bytes.
  if (input != nullptr) request.input = {input->data, input->count * item_bytes(input->dtype)};
  if (output != nullptr) request.output = {output->data, output->count * item_bytes(output->dtype)};
  request.counts = std::move(terms.counts);
  request.segment_bytes = terms.segment_bytes;
  const plan::Header& header = plan.image->header();
  request.descriptor.count = terms.count;
  request.descriptor.plan_key = terms.plan_key;
  request.descriptor.root = header.root;
  request.descriptor.collective = static_cast<Collective>(header.collective);
  request.descriptor.dtype = dtype;
  request.descriptor.op = static_cast<ReduceOp>(terms.op);
  if (terms.arrays != nullptr) {
    request.arrays = std::move(terms.arrays);
  } else if (terms.shape) {
    request.arrays =
        one_array(request.descriptor, static_cast<int>(terms.shape->size()), terms.shape->data());
  }
  if (user_op != nullptr) {
    request.combine = user_op->combine();
    request.reduction_failed = user_op->failed();
  } else {
    const ReduceOp op = request.descriptor.op;
    // The average of one rank's array is the array itself.
    if (op != ReduceOp::kAvg || plan::workers(header) > 1)
      request.form = kernels::wire_form(dtype, op);
    request.combine = kernels::combine_for(dtype, op);
    if (op == ReduceOp::kAvg && !request.form) request.scale = kernels::scale_for(dtype);
  }
  return request;
}

}  // namespace pycoll::bindings
