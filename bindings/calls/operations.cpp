#include "bindings/calls/operations.h"

#include <utility>

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/core/work_object.h"

namespace pycoll::bindings {
namespace {

// A handle without ownership; the caller keeps `operation` alive until it has ended.
std::shared_ptr<engine::Operation> borrow(engine::Operation& operation) {
  return {std::shared_ptr<engine::Operation>(), &operation};
}

executor::CollectiveRequest request_at(const Operation& operation, const std::byte* input,
                                       std::byte* output) {
  executor::CollectiveRequest request = operation.request;
  request.input.data = input;
  request.output.data = output;
  return request;
}

// The request with the arrays of a list or a group, which outlive the operation; nullptr:
// unchanged.
executor::CollectiveRequest belonging(executor::CollectiveRequest request,
                                      const executor::CallArrays* arrays) {
  if (arrays != nullptr) request.arrays = {std::shared_ptr<void>(), arrays};
  return request;
}

Status run_request(CommunicatorHandle& handle, executor::CollectiveRequest request) {
  const Nanoseconds timeout = handle.timeout();
  const ReleasedGil release;
  return handle.native->run(std::move(request), timeout, signal_raised);
}

}  // namespace

void fail(CallsObject* self, const Status& status, std::string_view part, std::string_view name) {
  self->state->handle->note_told(status);
  try {
    raise_if_failed(status, part);
  } catch (py::error_already_set& error) {
    const py::object kind = py::module_::import("pycoll.errors").attr("PycollError");
    if (py::isinstance(error.value(), kind)) {
      (void)call_python(as_handle(self).attr("_complete"), error.value(), py::str(name));
    }
    throw;
  }
  throw py::error_already_set();
}

Status run_bound(CommunicatorHandle& handle, const std::shared_ptr<engine::Call>& call,
                 const std::byte* input, std::byte* output, const executor::CallArrays* arrays) {
  engine::Communicator& native = *handle.native;
  Status status;
  if (native.size() == 1 && native.brief().try_alone(*call, input, output, &status)) return status;
  const Nanoseconds timeout = handle.timeout();
  engine::Operation operation;
  operation.belongs_to(arrays);
  const bool started = native.brief().try_start(call, input, output, borrow(operation), timeout,
                                                handle.alone ? kSpin : 0, false);
  if (started && operation.done()) return operation.status();
  std::shared_ptr<engine::Call> held = call;  // other threads may drop the call meanwhile
  const ReleasedGil release;
  if (started) return native.drive(operation, kForever, signal_raised);
  return native.run(engine::CallStart{std::move(held), input, output, borrow(operation)}, timeout,
                    signal_raised);
}

std::shared_ptr<engine::Operation> start_bound(CommunicatorHandle& handle,
                                               const std::shared_ptr<engine::Call>& call,
                                               const std::byte* input, std::byte* output) {
  engine::Communicator& native = *handle.native;
  const Nanoseconds timeout = handle.timeout();
  std::shared_ptr<engine::Operation> operation = new_operation();
  if (native.brief().try_start(call, input, output, operation, timeout, 0, true)) return operation;
  std::shared_ptr<engine::Call> held = call;
  const ReleasedGil release;
  (void)native.start(engine::CallStart{std::move(held), input, output, operation}, timeout);
  return operation;
}

std::shared_ptr<engine::Operation> start_request(CommunicatorHandle& handle,
                                                 const Operation& operation, const std::byte* input,
                                                 std::byte* output) {
  executor::CollectiveRequest request = request_at(operation, input, output);
  const Nanoseconds timeout = handle.timeout();
  const ReleasedGil release;
  return handle.native->start(std::move(request), timeout);
}

void run_operation(CallsObject* self, const OperationHandle& operation, const std::byte* input,
                   std::byte* output, std::string_view name, const executor::CallArrays* arrays) {
  CommunicatorHandle& handle = *self->state->handle;
  const Collective collective = operation->request.descriptor.collective;
  const Status status =
      operation->is_short()
          ? run_bound(handle, self->state->cache.bind(operation), input, output, arrays)
          : run_request(handle, belonging(request_at(*operation, input, output), arrays));
  if (!status.ok() || PyErr_Occurred() != nullptr) fail(self, status, name_of(collective), name);
}

void run_parts(CallsObject* self, const Operation& operation, std::vector<executor::Part> parts,
               const executor::CallArrays& arrays) {
  executor::CollectiveRequest request =
      belonging(request_at(operation, parts.front().input, parts.front().output), &arrays);
  request.parts = std::move(parts);
  const Collective collective = request.descriptor.collective;
  const Status status = run_request(*self->state->handle, std::move(request));
  if (!status.ok() || PyErr_Occurred() != nullptr) {
    fail(self, status, name_of(collective), name_of(collective));
  }
}

}  // namespace pycoll::bindings
