#include "bindings/calls/known_calls.h"

#include <cstring>
#include <memory>
#include <utility>

#include "bindings/calls/fused_calls.h"
#include "bindings/calls/offers.h"
#include "bindings/calls/operations.h"
#include "bindings/core/gil.h"
#include "bindings/core/raw.h"
#include "bindings/core/work_object.h"

namespace pycoll::bindings {
namespace {

// One call that the cache knows, with its arguments and its result.
struct KnownCall {
  CompiledCallHandle compiled;
  ParsedCall parsed;
  py::object result;
  ContiguousView made;  // of the result, if it is a new array

  const std::byte* input() const { return compiled->reads ? parsed.source.data : nullptr; }
  std::byte* output() const {
    if (!compiled->writes) return nullptr;
    if (compiled->makes) return made.data;
    return parsed.out == parsed.x ? parsed.source.data : parsed.target.data;
  }
  // Makes the result. False if its class cannot make it this way.
  bool prepare() {
    if (compiled->makes) {
      result = py::reinterpret_steal<py::object>(make_result(*compiled, parsed, &made));
      return static_cast<bool>(result);
    }
    result = py::reinterpret_borrow<py::object>(parsed.out == nullptr ? Py_None : parsed.out);
    return true;
  }
};

void fill(const std::string& identity, std::byte* output, std::uint64_t bytes) {
  for (std::uint64_t place = 0; place < bytes; place += identity.size()) {
    std::memcpy(output + place, identity.data(), identity.size());
  }
}

PyObject* start_known(CallsObject* self, KnownCall& call) {
  CommunicatorHandle& handle = *self->state->handle;
  const OperationHandle& known = call.compiled->operation;
  std::shared_ptr<engine::Operation> operation;
  if (known->is_short()) {
    const std::shared_ptr<engine::Call>& bound = self->state->cache.bind(known);
    Status alone;
    if (handle.native->size() == 1 &&
        handle.native->brief().try_alone(*bound, call.input(), call.output(), &alone) &&
        alone.ok()) {
      PyObject* work = make_open_work(std::move(call.result));
      fill_work(work);
      return work;
    }
    operation = start_bound(handle, bound, call.input(), call.output());
  } else {
    operation = start_request(handle, *known, call.input(), call.output());
  }
  py::object x;
  if (!operation->done() && call.parsed.x != nullptr)
    x = py::reinterpret_borrow<py::object>(call.parsed.x);
  return make_work({self->state->handle, std::move(operation), nullptr,
                    name_of(call.compiled->key.kind()), known->is_short()},
                   std::move(call.result), {}, std::move(x))
      .release()
      .ptr();
}

PyObject* run_known(CallsObject* self, KnownCall& call, bool async) {
  if (async) return start_known(self, call);
  const CompiledCall& compiled = *call.compiled;
  run_operation(self, compiled.operation, call.input(), call.output(),
                name_of(compiled.key.kind()));
  if (!compiled.identity.empty()) {
    fill(compiled.identity, call.output(), compiled.operation->request.output.bytes);
  }
  return call.result.release().ptr();
}

// ---- Messages

bool is_send(const executor::MessageRequest& request) {
  return request.kind == executor::MessageRequest::Kind::kSend;
}

// The name of a message's operation, as in the definitions of all calls with messages.
std::string_view part_of(const executor::MessageRequest& request) {
  return is_send(request) ? "send" : "recv";
}

executor::MessageRequest request_at(const executor::MessageRequest& message,
                                    const ParsedCall& parsed) {
  executor::MessageRequest request = message;
  request.data.data = is_send(message) ? parsed.source.data : parsed.target.data;
  return request;
}

// Starts the message. The caller waits for its end, or with `leave` the progress thread.
std::shared_ptr<engine::Operation> start_message(CommunicatorHandle& handle,
                                                 const executor::MessageRequest& request,
                                                 bool leave) {
  engine::Communicator& native = *handle.native;
  const Nanoseconds timeout = handle.timeout();
  if (request.data.bytes <= engine::Call::kShortBytes) {
    std::shared_ptr<engine::Operation> operation = new_operation();
    if (native.brief().try_start(request, operation, timeout, 0, leave)) return operation;
    reuse(std::move(operation));
  }
  const ReleasedGil release;
  return native.start(request, timeout);
}

// Drives the message to its end, and returns its status.
Status await_message(CommunicatorHandle& handle, std::shared_ptr<engine::Operation> operation) {
  Status status;
  if (operation->done()) {
    status = operation->status();
  } else {
    const ReleasedGil release;
    status = handle.native->drive(*operation, kForever, signal_raised);
  }
  reuse(std::move(operation));
  return status;
}

// Runs the only message of a call to its end. It needs no progress thread.
Status run_message(CommunicatorHandle& handle, const executor::MessageRequest& request) {
  const Nanoseconds timeout = handle.timeout();
  if (request.data.bytes <= engine::Call::kShortBytes) {
    std::shared_ptr<engine::Operation> operation = new_operation();
    if (handle.native->brief().try_start(request, operation, timeout, handle.alone ? kSpin : 0,
                                         false)) {
      return await_message(handle, std::move(operation));
    }
    reuse(std::move(operation));
  }
  const ReleasedGil release;
  return handle.native->run(request, timeout, signal_raised);
}

// Posts several messages and returns when all have ended, with the first error.
Status exchange_messages(CommunicatorHandle& handle, const KnownCall& call) {
  std::vector<std::shared_ptr<engine::Operation>> operations;
  operations.reserve(call.compiled->messages.size());
  for (const executor::MessageRequest& message : call.compiled->messages) {
    operations.push_back(start_message(handle, request_at(message, call.parsed), false));
  }
  Status first;
  for (std::shared_ptr<engine::Operation>& operation : operations) {
    if (handle.alone) handle.native->brief().try_drive(*operation, kSpin);
    Status status = await_message(handle, std::move(operation));
    if (first.ok()) first = std::move(status);
  }
  return first;
}

// Starts the only message of a call, and returns its Work.
PyObject* leave_message(CallsObject* self, KnownCall& call) {
  executor::MessageRequest request = request_at(call.compiled->messages.front(), call.parsed);
  py::object finish;
  if (request.peer == executor::kAnyPeer) {
    request.sender = std::make_shared<int>(executor::kAnyPeer);
    finish = py::cpp_function([sender = request.sender] { return *sender; });
  }
  auto operation = start_message(*self->state->handle, request, true);
  auto read = py::reinterpret_borrow<py::object>(call.parsed.x);
  return make_work({self->state->handle, std::move(operation), nullptr, part_of(request), true},
                   std::move(call.result), std::move(finish), std::move(read))
      .release()
      .ptr();
}

PyObject* run_messages(CallsObject* self, KnownCall& call) {
  const CompiledCall& compiled = *call.compiled;
  if (compiled.leaves) return leave_message(self, call);
  CommunicatorHandle& handle = *self->state->handle;
  const std::string_view name = name_of(compiled.key.kind());
  const bool alone = compiled.messages.size() == 1;
  const Status status =
      alone ? run_message(handle, request_at(compiled.messages.front(), call.parsed))
            : exchange_messages(handle, call);
  if (!status.ok() || PyErr_Occurred() != nullptr) {
    fail(self, status, alone ? part_of(compiled.messages.front()) : name, name);
  }
  return call.result.release().ptr();
}

// Continues in Python a call whose first exchanges had these outputs.
PyObject* resume(const PythonCall& call, const std::vector<std::vector<std::byte>>& outputs) {
  py::list told;
  for (const std::vector<std::byte>& output : outputs) {
    told.append(py::bytes(reinterpret_cast<const char*>(output.data()), output.size()));
  }
  py::dict words;
  for (std::size_t number = 0; number < kParameterCount; ++number) {
    PyObject* argument = call.arguments[number];
    if (argument != nullptr) words[kParameterNames[number].data()] = py::handle(argument);
  }
  const py::str name{std::string(name_of(call.kind))};
  const py::object definition = as_handle(call.self).attr("_resume");
  PyObject* given[] = {nullptr, name.ptr(), told.ptr(), words.ptr()};
  PyObject* result = run_definition(call, [&] {
    return call_python(definition.ptr(), given + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  });
  if (result == nullptr) throw py::error_already_set();
  return result;
}

// Runs the exchanges of a call, then its operation. An unexpected output of an exchange means
// another operation: the cache may know it, otherwise Python continues.
PyObject* exchange_and_run(const PythonCall& call, KnownCall& known) {
  CallsObject* self = call.self;
  std::vector<std::vector<std::byte>> outputs;
  while (outputs.size() < known.compiled->exchanges.size()) {
    const Exchange& exchange = known.compiled->exchanges[outputs.size()];
    std::vector<std::byte> output(exchange.expected.size());
    const std::byte* input = exchange.mine.empty() ? nullptr : exchange.mine.data();
    if (exchange.in_place) {
      output = exchange.mine;
      input = output.data();
    }
    run_operation(self, exchange.operation, input, output.data(), name_of(call.kind));
    const bool expected = output == exchange.expected;
    outputs.push_back(std::move(output));
    if (expected) continue;
    known.compiled = self->state->cache.find_after(call.kind, known.parsed, outputs);
    if (known.compiled == nullptr) return resume(call, outputs);
  }
  if (!known.prepare()) return resume(call, outputs);
  return run_known(self, known, at(call.arguments, Parameter::kAsync) == Py_True);
}

}  // namespace

std::optional<PyObject*> repeat_in_place(CallsObject* self, CallKind kind, PyObject* const* words,
                                         PyObject* x) {
  if (self->state == nullptr || UserOp::running()) return std::nullopt;
  CommunicatorHandle& handle = *self->state->handle;
  if (!handle.attend()) return nullptr;  // first: see call_natively()
  ContiguousView flat;
  if (!flatten(x, &flat)) return std::nullopt;
  const CompiledCallHandle& newest = self->state->cache.newest(kind);
  if (newest == nullptr || !newest->key.fits_in_place(words, x, flat)) return std::nullopt;
  if (self->group != Py_None) {
    if (self->fusions == nullptr || !newest->message) return std::nullopt;
    return guarded([&] { return self->fusions->add_in_place(*newest, x, flat); });
  }
  if (newest->operation == nullptr || !newest->rests() || !newest->operation->is_short()) {
    return std::nullopt;
  }
  if (handle.native->brief().rests_alone()) return Py_NewRef(x);
  return guarded([&] {
    const std::shared_ptr<engine::Call>& bound = self->state->cache.bind(newest->operation);
    const Status status = run_bound(handle, bound, flat.data, flat.data);
    if (!status.ok() || PyErr_Occurred() != nullptr) {
      fail(self, status, name_of(kind), name_of(kind));
    }
    return Py_NewRef(x);
  });
}

std::optional<PyObject*> call_natively(CallsObject* self, CallKind kind, const Arguments& arguments,
                                       CompiledCallHandle* hint) {
  if (self->state == nullptr || UserOp::running()) return std::nullopt;
  CommunicatorHandle& handle = *self->state->handle;
  // Comes first: it may run Python code, which may change everything that is read below.
  if (!handle.attend()) return nullptr;
  if (kind == CallKind::kAllReduce && is_list(at(arguments, Parameter::kX))) {
    return self->group != Py_None ? std::nullopt : run_list(self, arguments);
  }
  ParsedCall parsed;
  if (!parse(kind, arguments, &parsed)) return std::nullopt;
  const CompiledCallHandle* found = hint;
  if (hint == nullptr || *hint == nullptr || !(*hint)->is_whole() || !(*hint)->key.fits(parsed)) {
    found = self->state->cache.find(kind, parsed);
    if (found == nullptr) return std::nullopt;
    if (hint != nullptr) *hint = *found;
  }
  if (self->group != Py_None) {
    if (self->fusions == nullptr || !(*found)->message) return std::nullopt;
    return defer(self, *found, parsed);
  }
  if (!(*found)->is_whole()) return std::nullopt;
  const bool async = at(arguments, Parameter::kAsync) == Py_True;
  if (parsed.out != nullptr && parsed.out == parsed.x && handle.native->brief().rests_alone() &&
      (*found)->rests()) {
    if (!async) return Py_NewRef(parsed.out);
    return guarded([&] {
      PyObject* work = make_open_work(py::reinterpret_borrow<py::object>(parsed.out));
      fill_work(work);
      return work;
    });
  }
  KnownCall call{*found, parsed, {}, {}};
  std::optional<PyObject*> result;
  PyObject* done = guarded([&]() -> PyObject* {
    if (!call.compiled->exchanges.empty()) {
      result = exchange_and_run({self, kind, arguments}, call);
    } else if (call.prepare()) {
      result = is_message(kind) ? run_messages(self, call) : run_known(self, call, async);
    }
    return Py_None;
  });
  return done != nullptr ? result : nullptr;
}

}  // namespace pycoll::bindings
