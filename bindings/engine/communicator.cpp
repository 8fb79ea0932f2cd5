// Communicator. Every method releases the GIL before it waits for the communicator's lock, because
// a user's reduction may need the GIL while another thread holds that lock.
#include "engine/communicator.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/cores.h"
#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/core/handle.h"
#include "bindings/core/work_object.h"
#include "bindings/engine/request.h"
#include "bindings/engine/transport.h"

namespace pycoll::bindings {
namespace {

using engine::Operation;
using Shared = SharedHandle;

// The process id of a name "host:pid".
std::string_view pid_of(std::string_view name) { return name.substr(name.rfind(':') + 1); }

// Whether no other rank has this rank's process id. A process on another host may have the same id
// by chance; that only costs a little time.
bool is_alone(const std::vector<std::string>& names, std::size_t rank) {
  return std::count_if(names.begin(), names.end(), [&](const std::string& name) {
           return pid_of(name) == pid_of(names[rank]);
         }) == 1;
}

Shared make(int rank, int size, const std::vector<py::object>& transports, double timeout_s,
            std::vector<std::string> names, int cores, bool cpu_balancing) {
  auto handle = std::make_shared<CommunicatorHandle>();
  handle->timeout_s = timeout_s;
  if (rank >= 0 && static_cast<std::size_t>(rank) < names.size()) {
    handle->alone = is_alone(names, static_cast<std::size_t>(rank));
  }
  engine::EngineOptions options;
  options.rank = rank;
  options.size = size;
  options.names = std::move(names);
  options.cores = cores;
  options.cpu_balancing = cpu_balancing;
  options.clock = std::make_shared<SteadyClock>();
  for (const py::object& one : transports) {
    options.transports.push_back(one.cast<TransportHandle&>().transport);
  }
  raise_if_failed(engine::Communicator::create(std::move(options), &handle->native), "init");
  return handle;
}

// How to run an operation, and the result of its Work.
struct SubmitOptions {
  bool asynchronous = false;
  std::optional<double> timeout_s;
  py::object result;
  py::object finish;
};

// Runs a request and returns None, or starts it and returns a Work.
template <typename Request>
py::object submit(const Shared& communicator, Request&& request, std::string_view name,
                  SubmitOptions options, py::tuple objects, std::shared_ptr<UserOp> user_op) {
  refuse_inside_reduction(name);
  if (!communicator->attend()) throw py::error_already_set();
  const Nanoseconds timeout =
      options.timeout_s ? nanoseconds(*options.timeout_s) : communicator->timeout();
  if (options.asynchronous) {
    std::shared_ptr<Operation> operation;
    {
      const ReleasedGil release;
      operation = communicator->native->start(std::forward<Request>(request), timeout);
    }
    communicator->keep(operation, std::move(objects));
    return make_work({communicator, std::move(operation), std::move(user_op), name},
                     std::move(options.result), std::move(options.finish));
  }
  Status status;
  {
    const ReleasedGil release;
    status = communicator->native->run(std::forward<Request>(request), timeout, signal_raised);
  }
  communicator->note_told(status);
  if (user_op != nullptr) user_op->rethrow();
  raise_if_failed(status, name, communicator->native->names());
  return py::none();
}

py::object run_collective(const Shared& communicator, const std::shared_ptr<RequestHandle>& request,
                          const BufferView* input, const BufferView* output, bool asynchronous,
                          py::object finish, const BufferView* residual) {
  const std::string_view name = name_of(request->request.descriptor.collective);
  py::tuple objects =
      py::make_tuple(py::cast(input, py::return_value_policy::reference),
                     py::cast(output, py::return_value_policy::reference), py::cast(request),
                     py::cast(residual, py::return_value_policy::reference));
  return submit(communicator, with_memory(*request, input, output, residual), name,
                {asynchronous, std::nullopt, py::none(), std::move(finish)}, std::move(objects),
                request->user_op);
}

py::object message(const Shared& communicator, executor::MessageRequest::Kind kind,
                   BufferView& data, int peer, std::uint32_t tag, SubmitOptions options,
                   std::shared_ptr<int> sender = nullptr) {
  const bool sending = kind == executor::MessageRequest::Kind::kSend;
  const executor::MessageRequest request{
      kind, peer, tag, {data.data, data.count * item_bytes(data.dtype)}, std::move(sender)};
  return submit(communicator, request, sending ? "send" : "recv", std::move(options),
                py::make_tuple(py::cast(data, py::return_value_policy::reference)), nullptr);
}

// Returns a Work whose wait() returns the sender.
py::object recv_any(const Shared& communicator, BufferView& data, std::uint32_t tag,
                    std::optional<double> timeout_s) {
  const auto sender = std::make_shared<int>(executor::kAnyPeer);
  SubmitOptions options{true, timeout_s, py::none(),
                        py::cpp_function([sender] { return *sender; })};
  return message(communicator, executor::MessageRequest::Kind::kRecv, data, executor::kAnyPeer, tag,
                 std::move(options), sender);
}

// Waits for a message of unknown length by `wait(found, &status)`, which runs without the GIL.
// Returns null if none has come, and raises failures.
template <typename Wait>
std::shared_ptr<executor::Probed> await_message(const Shared& communicator, std::string_view name,
                                                const Wait& wait) {
  refuse_inside_reduction(name);
  if (!communicator->attend()) throw py::error_already_set();
  auto found = std::make_shared<executor::Probed>();
  Status status;
  bool is_there = false;
  {
    const ReleasedGil release;
    is_there = wait(found, &status);
  }
  if (!status.ok() || PyErr_Occurred() != nullptr) {
    communicator->note_told(status);
    raise_if_failed(status, name, communicator->native->names());
  }
  return is_there ? std::move(found) : nullptr;
}

// Returns (source, tag, bytes), or None if no message has arrived within `patience_s` seconds.
py::object probe(const Shared& communicator, int source, std::optional<std::uint32_t> tag,
                 double patience_s) {
  const auto found = await_message(
      communicator, "probe", [&](const std::shared_ptr<executor::Probed>& told, Status* status) {
        return communicator->native->probe({source, tag.value_or(executor::kAnyTag), told},
                                           nanoseconds(patience_s), signal_raised, status);
      });
  if (found == nullptr) return py::none();
  return py::make_tuple(found->source, found->tag, found->bytes);
}

// Returns the bytes of the message, or None if none has arrived within `patience_s` seconds.
py::object recv_within(const Shared& communicator, BufferView& data, int source, std::uint32_t tag,
                       double patience_s) {
  const executor::Memory memory{data.data, data.bytes()};
  const Nanoseconds timeout = communicator->timeout();
  const auto found = await_message(
      communicator, "recv", [&](const std::shared_ptr<executor::Probed>& told, Status* status) {
        return communicator->native->recv_within(
            {source, tag, told}, memory, nanoseconds(patience_s), timeout, signal_raised, status);
      });
  if (found == nullptr) return py::none();
  return py::int_(found->bytes);
}

void abort(const Shared& communicator, const std::string& why) {
  refuse_inside_reduction("abort");
  Status status;
  {
    const ReleasedGil release;
    status = communicator->native->abort(why);
  }
  raise_if_failed(status, "abort");
}

std::string transport_of(const Shared& communicator, int peer) {
  if (peer < 0 || peer >= communicator->native->size()) {
    throw py::index_error("peer is " + std::to_string(peer) + ": expected a rank from 0 to " +
                          std::to_string(communicator->native->size() - 1));
  }
  return std::string(communicator->native->media()[static_cast<std::size_t>(peer)]);
}

// The functions that keep the sequence numbers of ranks equal, whatever a call consists of.
void bind_calls_of(py::class_<CommunicatorHandle, Shared>& type) {
  type.def(
          "calls", [](const Shared& self) { return self->native->calls(); },
          "Changes whenever a collective is started or refused.")
      .def(
          "refuse",
          [](const Shared& self, const std::string& why) {
            if (UserOp::running()) return;
            const ReleasedGil release;
            self->native->refuse(why);
          },
          py::arg("why"),
          "Count the next collective as called, and tell the other ranks why this rank does not "
          "take part in it.")
      .def(
          "begin_call",
          [](const Shared& self) {
            refuse_inside_reduction("all_reduce");
            const ReleasedGil release;
            self->native->begin_call();
          },
          "Make the collectives until end_call() parts of one call.")
      .def("end_call", [](const Shared& self) {
        const ReleasedGil release;
        self->native->end_call();
      });
}

}  // namespace

void bind_communicator(py::module_& module) {
  using MessageKind = executor::MessageRequest::Kind;
  module.def("work_in_background", &engine::work_in_background,
             "Mark the calling thread as one that waits while others compute and need its core.");
  module.def("can_move_to_core", &can_move,
             "Whether this thread may set its affinity mask, and finds it as it was set.");
  py::class_<CommunicatorHandle, Shared> type(module, "Communicator",
                                              "One rank's operations over its transports.");
  bind_calls_of(type);
  type.def("abort", &abort, py::arg("why"));
  type.def("probe", &probe, py::arg("source"), py::arg("tag"), py::arg("patience_s"));
  type.def("recv_within", &recv_within, py::arg("data"), py::arg("source"), py::arg("tag"),
           py::arg("patience_s"),
           "Receive the next message if it fits; return its bytes, or None.");
  type.def(py::init(&make), py::arg("rank"), py::arg("size"), py::arg("transports"),
           py::arg("timeout_s"), py::arg("names"), py::arg("cores") = 0,
           py::arg("cpu_balancing") = true)
      .def_property_readonly("rank", [](const Shared& self) { return self->native->rank(); })
      .def_property_readonly("size", [](const Shared& self) { return self->native->size(); })
      .def_readwrite("timeout_s", &CommunicatorHandle::timeout_s)
      .def("run", &run_collective, py::arg("request"), py::arg("input").none(true),
           py::arg("output").none(true), py::arg("asynchronous") = false,
           py::arg("finish") = py::none(), py::arg("residual").none(true) = py::none())
      .def(
          "send",
          [](const Shared& self, BufferView& data, int dest, std::uint32_t tag, bool asynchronous,
             std::optional<double> timeout_s) {
            return message(self, MessageKind::kSend, data, dest, tag,
                           {asynchronous, timeout_s, py::none(), py::none()});
          },
          py::arg("data"), py::arg("dest"), py::arg("tag"), py::arg("asynchronous") = false,
          py::arg("timeout_s") = py::none())
      .def(
          "recv",
          [](const Shared& self, BufferView& data, int source, std::uint32_t tag, bool asynchronous,
             py::object result, std::optional<double> timeout_s) {
            return message(self, MessageKind::kRecv, data, source, tag,
                           {asynchronous, timeout_s, std::move(result), py::none()});
          },
          py::arg("data"), py::arg("source"), py::arg("tag"), py::arg("asynchronous") = false,
          py::arg("result") = py::none(), py::arg("timeout_s") = py::none())
      .def("recv_any", &recv_any, py::arg("data"), py::arg("tag"),
           py::arg("timeout_s") = py::none())
      .def(
          "failure",
          [](const Shared& self) -> std::optional<std::string> {
            refuse_inside_reduction("failure");
            const ReleasedGil release;
            const Status status = self->native->failure();
            if (status.ok()) return std::nullopt;
            return status.message();
          },
          "Why the communicator can no longer be used, or None.")
      .def("transport_of", &transport_of, py::arg("peer"))
      .def("close", [](const Shared& self) {
        refuse_inside_reduction("close");
        self->close();
      });
}

}  // namespace pycoll::bindings
