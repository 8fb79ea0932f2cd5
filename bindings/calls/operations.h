// Runs and starts operations of the engine for calls that native code knows. Requires everywhere:
// the GIL.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "bindings/calls/calls.h"

namespace pycoll::bindings {

// Throws the error of `status`, for the operation `part` of the call `name`, as the definition of
// that call would.
[[noreturn]] void fail(CallsObject* self, const Status& status, std::string_view part,
                       std::string_view name);

// Runs a call to its end. `arrays`: of the list or group to which the operation belongs, for error
// texts.
Status run_bound(CommunicatorHandle& handle, const std::shared_ptr<engine::Call>& call,
                 const std::byte* input, std::byte* output,
                 const executor::CallArrays* arrays = nullptr);
// Starts a call, or an operation that is too long for one, and leaves it to the progress thread.
std::shared_ptr<engine::Operation> start_bound(CommunicatorHandle& handle,
                                               const std::shared_ptr<engine::Call>& call,
                                               const std::byte* input, std::byte* output);
std::shared_ptr<engine::Operation> start_request(CommunicatorHandle& handle,
                                                 const Operation& operation, const std::byte* input,
                                                 std::byte* output);

// Runs an operation of the call `name` to its end. Throws its error as the definition would.
void run_operation(CallsObject* self, const OperationHandle& operation, const std::byte* input,
                   std::byte* output, std::string_view name,
                   const executor::CallArrays* arrays = nullptr);
// Runs an all_reduce of several arrays to its end, without copying them into one message. Throws
// its error as the definition would.
void run_parts(CallsObject* self, const Operation& operation, std::vector<executor::Part> parts,
               const executor::CallArrays& arrays);

}  // namespace pycoll::bindings
