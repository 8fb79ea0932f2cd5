// A collective without memory, made by Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/arrays/buffer.h"
#include "bindings/core/user_op.h"
#include "executor/request.h"

namespace pycoll::bindings {

// _core.Request. Immutable; Python, compiled calls and running operations share it.
struct RequestHandle {
  executor::CollectiveRequest request;
  std::shared_ptr<UserOp> user_op;  // owns the functions to which the request points
};
using SharedRequest = std::shared_ptr<const RequestHandle>;

// The request for the memory of these arrays; nullptr: none. The caller keeps the views alive until
// the operation is done. `residual`: see CollectiveRequest.
executor::CollectiveRequest with_memory(const RequestHandle& handle, const BufferView* input,
                                        const BufferView* output,
                                        const BufferView* residual = nullptr);

void bind_requests(pybind11::module_& module);

}  // namespace pycoll::bindings
