// Converts the arguments of Communicator.run and Simulation.add to a request.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/calls/user_op.h"
#include "bindings/core/plan.h"
#include "executor/request.h"

namespace pycoll::bindings {

// Everything that must be equal on all ranks in one collective, except the plan and the arrays.
struct Terms {
  int dtype = 0;
  int op = 0;
  std::vector<std::uint64_t> counts;  // elements of each block (csrc/plan/FORMAT.md)
  std::uint64_t plan_key = 0;
  std::uint64_t count = 0;
  std::uint32_t segment_bytes = transport::kSegmentBytesMax;
  // Shape of the array, if all ranks must pass the same; for error texts.
  std::optional<std::vector<std::int64_t>> shape = std::nullopt;
  // All arrays of the list or group to which the arrays belong; for error texts.
  std::shared_ptr<const executor::CallArrays> arrays = nullptr;
};

// The only array of a call, for error texts.
std::shared_ptr<const executor::CallArrays> one_array(const transport::Descriptor& descriptor,
                                                      int axes, const std::int64_t* lengths);

// Borrows the memory of the arrays: the caller keeps the views alive until the operation is done.
executor::CollectiveRequest make_request(const PlanHandle& plan, const BufferView* input,
                                         BufferView* output, Terms terms,
                                         const std::shared_ptr<UserOp>& user_op);

}  // namespace pycoll::bindings
