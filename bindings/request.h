// How the arguments of Communicator.run and Simulation.add become a request.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/plan.h"
#include "bindings/user_op.h"
#include "runtime/request.h"

namespace pycoll::bindings {

// What every rank must say alike about one collective, beside the plan and the arrays.
struct Terms {
  int dtype = 0;
  int op = 0;
  std::vector<std::uint64_t> counts;  // elements of each block (csrc/plan/FORMAT.md)
  std::uint64_t plan_key = 0;
  std::uint64_t count = 0;
  std::uint32_t segment_bytes = transport::kSegmentBytesMax;
  // Of the array that all ranks pass alike, for error texts.
  std::optional<std::vector<std::int64_t>> shape = std::nullopt;
};

// The arrays' memory is borrowed: the caller keeps the views alive until the operation is done.
runtime::CollectiveRequest make_request(const PlanHandle& plan, const BufferView* input,
                                        BufferView* output, Terms terms,
                                        const std::shared_ptr<UserOp>& user_op);

}  // namespace pycoll::bindings
