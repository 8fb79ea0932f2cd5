// Runs a parsed call.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "bindings/calls/collectives.h"
#include "bindings/calls/fusions.h"
#include "bindings/calls/user_op.h"
#include "bindings/core/bind.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"
#include "bindings/core/work.h"

namespace pycoll::bindings {
namespace {

using engine::Operation;

// A handle without ownership; the caller keeps `operation` alive until it has ended.
std::shared_ptr<Operation> borrowed(Operation& operation) {
  return {std::shared_ptr<Operation>(), &operation};
}

}  // namespace

void complete(CallsObject* self, py::error_already_set& error, std::string_view name) {
  const py::object kind = py::module_::import("pycoll.errors").attr("PycollError");
  const py::object& value = error.value();
  if (!py::isinstance(value, kind)) return;
  const py::object add = py::handle(reinterpret_cast<PyObject*>(self)).attr("_complete");
  (void)call_python(add, value, py::str(name));
}

void fail(CallsObject* self, const Status& status, std::string_view part, std::string_view name) {
  self->table->handle().note_told(status);
  try {
    raise_if_failed(status, part);
  } catch (py::error_already_set& error) {
    complete(self, error, name);
    throw;
  }
  throw py::error_already_set();
}

Status run_call(CommunicatorHandle& handle, const std::shared_ptr<engine::Call>& call,
                const std::byte* input, std::byte* output, const executor::CallArrays* arrays) {
  engine::Communicator& native = *handle.native;
  Status status;
  if (native.size() == 1 && native.try_alone(*call, input, output, &status)) return status;
  const Nanoseconds timeout = handle.timeout();
  Operation operation;
  operation.belongs_to(arrays);
  const bool started = native.try_start(call, input, output, borrowed(operation), timeout,
                                        handle.alone ? kSpin : 0, false);
  if (started && operation.done()) return operation.status();
  std::shared_ptr<engine::Call> held = call;  // other threads may drop the call meanwhile
  const ReleasedGil release;
  if (started) return native.drive(operation, kForever, signal_raised);
  return native.run(std::move(held), input, output, borrowed(operation), timeout, signal_raised);
}

namespace {

std::shared_ptr<Operation> start_call(CommunicatorHandle& handle,
                                      const std::shared_ptr<engine::Call>& call,
                                      const std::byte* input, std::byte* output) {
  engine::Communicator& native = *handle.native;
  const Nanoseconds timeout = handle.timeout();
  std::shared_ptr<Operation> operation = new_operation();
  if (native.try_start(call, input, output, operation, timeout, 0, true)) {
    return operation;
  }
  std::shared_ptr<engine::Call> held = call;
  const ReleasedGil release;
  native.start(std::move(held), input, output, operation, timeout);
  return operation;
}

// Refers to the arrays of a list or a group, which outlive the operation.
void belong_to(const ArraysTerms& arrays, executor::CollectiveRequest& request) {
  if (arrays.all != nullptr) request.arrays = {std::shared_ptr<void>(), arrays.all};
}

executor::CollectiveRequest make_request(const CompiledCall& prepared, const ParsedCall& parsed) {
  executor::CollectiveRequest request = request_of(prepared, parsed.blocks(), parsed.input_bytes(),
                                                   parsed.output_bytes(), parsed.arrays);
  request.input.data = parsed.input();
  request.output.data = parsed.output();
  belong_to(parsed.arrays, request);
  return request;
}

Status run_request(CommunicatorHandle& handle, executor::CollectiveRequest request) {
  const Nanoseconds timeout = handle.timeout();
  const ReleasedGil release;
  return handle.native->run(std::move(request), timeout, signal_raised);
}

// Writes exscan's result on rank 0, whose plan writes nothing.
void fill_identity(const CompiledCall& prepared, const ContiguousView& target) {
  const std::size_t item = item_bytes(target.dtype);
  for (std::uint64_t element = 0; element < target.count; ++element) {
    std::memcpy(target.data + element * item, prepared.identity.data(), item);
  }
}

std::shared_ptr<Operation> start_request(CommunicatorHandle& handle,
                                         executor::CollectiveRequest request) {
  const Nanoseconds timeout = handle.timeout();
  const ReleasedGil release;
  return handle.native->start(std::move(request), timeout);
}

}  // namespace

PyObject* run_parsed(CallsObject* self, const CompiledCallHandle& prepared, ParsedCall& parsed,
                     CallCache* cache, PyObject* out) {
  CallTable& table = *self->table;
  CommunicatorHandle& handle = table.handle();
  const auto* call = table.call(prepared, parsed.blocks(), parsed.input_bytes(),
                                parsed.output_bytes(), parsed.arrays);
  const std::string_view name = name_of(parsed.choice.collective);
  // Copies of handles that are used after the operation, during which the table may drop them.
  CompiledCallHandle filling;
  if (parsed.fills_identity) filling = prepared;
  std::shared_ptr<engine::Call> noted;
  if (cache != nullptr && call != nullptr) noted = *call;
  if (parsed.plain_in_place && call != nullptr) {
    table.in_place(parsed.source) = *call;
  }
  if (!parsed.async) {
    const Status status = call != nullptr ? run_call(handle, *call, parsed.input(), parsed.output(),
                                                     parsed.arrays.all)
                                          : run_request(handle, make_request(*prepared, parsed));
    if (!status.ok() || PyErr_Occurred() != nullptr) fail(self, status, name, name);
    if (filling != nullptr) fill_identity(*filling, parsed.target);
    if (noted != nullptr) cache->note(self, parsed, noted, out);
    return parsed.result.release().ptr();
  }
  Status alone;
  if (call != nullptr && handle.native->size() == 1 &&
      handle.native->try_alone(**call, parsed.input(), parsed.output(), &alone) && alone.ok()) {
    PyObject* work = make_open_work(std::move(parsed.result));
    fill_work(work);
    return work;
  }
  std::shared_ptr<Operation> operation =
      call != nullptr ? start_call(handle, *call, parsed.input(), parsed.output())
                      : start_request(handle, make_request(*prepared, parsed));
  py::object x;
  if (!operation->done()) x = py::reinterpret_borrow<py::object>(parsed.x);
  return make_work({table.shared(), std::move(operation), nullptr, name, call != nullptr},
                   std::move(parsed.result), {}, std::move(x))
      .release()
      .ptr();
}

void run_parts(CallsObject* self, const CompiledCall& prepared, DType dtype,
               std::vector<executor::Part> parts, const ArraysTerms& arrays) {
  const std::uint64_t bytes = parts.back().end;
  const std::uint64_t count = bytes / item_bytes(dtype);
  executor::CollectiveRequest request = request_of(prepared, {&count, 1}, bytes, bytes, arrays);
  belong_to(arrays, request);
  request.input.data = parts.front().input;
  request.output.data = parts.front().output;
  request.parts = std::move(parts);
  const Status status = run_request(self->table->handle(), std::move(request));
  const std::string_view name = name_of(Collective::kAllReduce);
  if (!status.ok() || PyErr_Occurred() != nullptr) fail(self, status, name, name);
}

namespace {

bool is_plain_in_place(Collective collective, const Arguments& arguments) {
  if (collective != Collective::kAllReduce ||
      at(arguments, Parameter::kOut) != at(arguments, Parameter::kX)) {
    return false;
  }
  for (const Parameter other : {Parameter::kOp, Parameter::kAlgorithm, Parameter::kDeterministic}) {
    if (at(arguments, other) != nullptr) return false;
  }
  return true;
}

std::optional<PyObject*> read_and_run(CallsObject* self, Collective collective,
                                      const Arguments& arguments, CallCache* cache) {
  const bool grouped = self->group != Py_None;
  if (self->table == nullptr || UserOp::running()) return std::nullopt;
  if (!absent(at(arguments, Parameter::kStream))) return std::nullopt;  // for device arrays
  if (collective != Collective::kAllToAll && !absent(at(arguments, Parameter::kSplits))) {
    return std::nullopt;
  }
  if (grouped && (self->fusions == nullptr || collective != Collective::kAllReduce)) {
    return std::nullopt;
  }
  if (!self->table->handle().attend()) throw py::error_already_set();
  if (!grouped && needs_telling(collective, arguments)) {
    return tell_and_run(self, collective, arguments);
  }
  if (collective == Collective::kAllReduce && is_list(at(arguments, Parameter::kX))) {
    return grouped ? std::nullopt : run_list(self, arguments);
  }
  ParsedCall parsed;
  if (!read_call(*self, collective, arguments, &parsed)) return std::nullopt;
  if (grouped) return defer_natively(self, parsed);
  parsed.plain_in_place = is_plain_in_place(collective, arguments);
  const CompiledCallHandle& prepared = self->table->find(parsed.choice);
  if (prepared == nullptr) return std::nullopt;
  return run_parsed(self, prepared, parsed, cache,
                    arguments[static_cast<std::size_t>(Parameter::kOut)]);
}

}  // namespace

namespace {

// Returns a new reference to `out`, or nullptr with an error set.
PyObject* run_known(CallsObject* self, Collective collective,
                    const std::shared_ptr<engine::Call>& call, const std::byte* input,
                    std::byte* output, PyObject* out) {
  CommunicatorHandle& handle = self->table->handle();
  // A wire form may change elements even with one rank: truth values become 1 and 0.
  const bool rests = input == output && !call->request().form && handle.native->rests_alone();
  if (rests) return Py_NewRef(out);
  const Status status = run_call(handle, call, input, output);
  if (status.ok() && PyErr_Occurred() == nullptr) return Py_NewRef(out);
  return guarded(
      [&]() -> PyObject* { fail(self, status, name_of(collective), name_of(collective)); });
}

}  // namespace

namespace {

// As run_known(), but starts the call and returns a Work.
PyObject* start_known(CallsObject* self, const std::shared_ptr<engine::Call>& call, std::byte* data,
                      PyObject* x) {
  CommunicatorHandle& handle = self->table->handle();
  auto result = py::reinterpret_borrow<py::object>(x);
  if (handle.native->rests_alone()) {
    PyObject* work = make_open_work(std::move(result));
    fill_work(work);
    return work;
  }
  std::shared_ptr<Operation> operation = start_call(handle, call, data, data);
  return make_work({self->table->shared(), std::move(operation), nullptr,
                    name_of(Collective::kAllReduce), true},
                   std::move(result), {})
      .release()
      .ptr();
}

}  // namespace

std::optional<PyObject*> reduce_in_place(CallsObject* self, PyObject* x, bool async) {
  if (self->table == nullptr || UserOp::running()) return std::nullopt;
  // First, because it may run Python code, which may change everything that is read below.
  if (!self->table->handle().attend()) return nullptr;
  ContiguousView flat;
  if (!flatten(x, &flat) || !flat.writable) return std::nullopt;
  if (self->group != Py_None) return defer_in_place(self, x, flat);
  const auto& call = self->table->in_place(flat);
  if (call == nullptr) return std::nullopt;
  if (async) return guarded([&] { return start_known(self, call, flat.data, x); });
  return run_known(self, Collective::kAllReduce, call, flat.data, flat.data, x);
}

bool Look::same(PyObject* object) const {
  ContiguousView now;
  return flatten(object, &now) && now.data == flat.data && now.dtype == flat.dtype &&
         now.writable == flat.writable && same_shape(now, flat.ndim, shape.data());
}

bool Look::take(const ContiguousView& seen) {
  if (seen.ndim > kAxesMax) return false;
  flat = seen;
  std::copy(seen.shape, seen.shape + seen.ndim, shape.begin());
  return true;
}

std::optional<PyObject*> CallCache::run(CallsObject* self, Collective collective, PyObject* x,
                                        PyObject* out) {
  if (call_ == nullptr || self->table == nullptr || UserOp::running()) return std::nullopt;
  if (!self->table->handle().attend()) return nullptr;  // first: see reduce_in_place()
  if (call_ == nullptr || self->group != Py_None || self->table->generation() != generation_ ||
      !x_.same(x) || (out != x && !out_.same(out))) {
    return std::nullopt;
  }
  return run_known(self, collective, call_, x_.flat.data, out_.flat.data, out);
}

// Remembers only calls that write to the caller's memory, because a new array differs at each call.
void CallCache::note(CallsObject* self, const ParsedCall& parsed,
                     const std::shared_ptr<engine::Call>& call, PyObject* out) {
  call_ = nullptr;
  if (out == nullptr || parsed.result.ptr() != out || !parsed.reads || !parsed.writes ||
      parsed.async || parsed.fills_identity) {
    return;
  }
  ContiguousView target;
  if (!x_.take(parsed.source) || !flatten(out, &target) || !out_.take(target)) return;
  generation_ = self->table->generation();
  call_ = call;
}

std::optional<PyObject*> call_natively(CallsObject* self, Collective collective,
                                       const Arguments& arguments, CallCache* cache) {
  std::optional<PyObject*> result = nullptr;
  PyObject* done = guarded([&] {
    result = read_and_run(self, collective, arguments, cache);
    return Py_None;
  });
  return done != nullptr ? result : nullptr;
}

}  // namespace pycoll::bindings
