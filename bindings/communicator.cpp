// Communicator, Work and UserOp. Every call releases the GIL before it takes the communicator's
// lock: a user's reduction may want the GIL while that lock is held.
#include "runtime/communicator.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "bindings/bind.h"
#include "bindings/request.h"

namespace pycoll::bindings {
namespace {

using runtime::Operation;

// No time at all for what is negative or not a number.
Nanoseconds nanoseconds(double seconds) {
  if (!(seconds > 0)) return 0;
  return seconds >= 9e9 ? kForever : static_cast<Nanoseconds>(seconds * 1e9);
}

// A reduction runs under the communicator's lock, possibly on the progress thread.
void refuse_inside_reduction(std::string_view what) {
  if (!UserOp::running()) return;
  raise_if_failed(Status::error(Code::kInvalidArgument,
                                std::string(what) + " was called by a user's reduction: a "
                                                    "reduction may only combine its two arrays"),
                  what);
}

// True with a Python error set when a signal's handler raised (Ctrl-C).
bool signal_raised() {
  const py::gil_scoped_acquire gil;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

struct CommunicatorHandle {
  runtime::Communicator::Handle native;
  double timeout_s = 0;
  // Arrays and user operations of non-blocking operations, whether or not somebody holds their
  // Work: kept alive until these are done. Guarded by the GIL.
  struct Kept {
    std::shared_ptr<Operation> operation;
    py::tuple objects;
  };
  std::vector<Kept> kept;

  ~CommunicatorHandle() {
    try {
      discard();
    } catch (const std::exception&) {
      // No thread or memory to be had: the process's end must do.
      [[maybe_unused]] auto* left_behind = native.release();
    }
  }
  CommunicatorHandle() = default;
  CommunicatorHandle(const CommunicatorHandle&) = delete;
  CommunicatorHandle& operator=(const CommunicatorHandle&) = delete;

  // A reduction's garbage collection may find this, inside the lock that closing needs.
  void discard() {
    if (UserOp::running()) {
      std::thread([native = std::move(native), kept = std::move(kept)]() mutable {
        native.reset();
        const py::gil_scoped_acquire gil;
        kept.clear();
      }).detach();
      return;
    }
    close();
    const py::gil_scoped_release release;
    native.reset();
  }

  void close() {
    if (native == nullptr) return;
    {
      const py::gil_scoped_release release;
      native->close();
    }
    drop_done();
  }

  void keep(std::shared_ptr<Operation> operation, py::tuple objects) {
    if (!operation->done()) kept.push_back({std::move(operation), std::move(objects)});
  }

  // What goes may run any Python code, which may come back here.
  void drop_done() {
    if (kept.empty()) return;
    const auto done = std::stable_partition(kept.begin(), kept.end(),
                                            [](const Kept& one) { return !one.operation->done(); });
    const std::vector<Kept> going(std::make_move_iterator(done),
                                  std::make_move_iterator(kept.end()));
    kept.erase(done, kept.end());
  }
  Nanoseconds timeout(const std::optional<double>& given) const {
    return nanoseconds(given.value_or(timeout_s));
  }
};
using Shared = std::shared_ptr<CommunicatorHandle>;

struct Work {
  Shared communicator;
  std::shared_ptr<Operation> operation;
  std::string name;
  std::shared_ptr<UserOp> user_op;

  void wait(const std::optional<double>& timeout_s) {
    refuse_inside_reduction("wait");
    Status status;
    {
      const py::gil_scoped_release release;
      status = communicator->native->drive(
          *operation, timeout_s ? nanoseconds(*timeout_s) : kForever, signal_raised);
    }
    communicator->drop_done();
    if (user_op != nullptr) user_op->rethrow();
    raise_if_failed(status, name);
  }
};

Shared make(int rank, int size, const std::vector<py::object>& transports, double timeout_s,
            std::vector<std::string> names) {
  runtime::EngineOptions options;
  options.rank = rank;
  options.size = size;
  options.names = std::move(names);
  options.clock = std::make_shared<SteadyClock>();
  for (const py::object& one : transports) {
    options.transports.push_back(one.cast<TransportHandle&>().transport);
  }
  auto handle = std::make_shared<CommunicatorHandle>();
  handle->timeout_s = timeout_s;
  raise_if_failed(runtime::Communicator::create(std::move(options), &handle->native), "init");
  return handle;
}

// Runs or starts a request; gives a Work for the latter.
template <typename Request>
std::optional<Work> submit(const Shared& communicator, Request request, std::string name,
                           bool asynchronous, const std::optional<double>& timeout_s,
                           py::tuple objects, std::shared_ptr<UserOp> user_op) {
  refuse_inside_reduction(name);
  communicator->drop_done();
  const Nanoseconds timeout = communicator->timeout(timeout_s);
  if (asynchronous) {
    std::shared_ptr<Operation> operation;
    {
      const py::gil_scoped_release release;
      operation = communicator->native->start(std::move(request), timeout);
    }
    communicator->keep(operation, std::move(objects));
    return Work{communicator, std::move(operation), std::move(name), std::move(user_op)};
  }
  Status status;
  {
    const py::gil_scoped_release release;
    status = communicator->native->run(std::move(request), timeout, signal_raised);
  }
  if (user_op != nullptr) user_op->rethrow();
  raise_if_failed(status, name);
  return std::nullopt;
}

std::optional<Work> run(const Shared& communicator, const PlanHandle& plan, const BufferView* input,
                        BufferView* output, int dtype, int op, std::vector<std::uint64_t> counts,
                        std::uint64_t plan_key, std::uint64_t count, std::uint32_t segment_bytes,
                        const std::shared_ptr<UserOp>& user_op, bool asynchronous,
                        const std::optional<double>& timeout_s) {
  runtime::CollectiveRequest request = make_request(
      plan, input, output, {dtype, op, std::move(counts), plan_key, count, segment_bytes}, user_op);
  std::string name(name_of(request.descriptor.collective));
  py::tuple objects =
      py::make_tuple(py::cast(input, py::return_value_policy::reference),
                     py::cast(output, py::return_value_policy::reference), py::cast(user_op));
  return submit(communicator, std::move(request), std::move(name), asynchronous, timeout_s,
                std::move(objects), user_op);
}

std::optional<Work> message(const Shared& communicator, runtime::MessageRequest::Kind kind,
                            BufferView& data, int peer, std::uint32_t tag, bool asynchronous,
                            const std::optional<double>& timeout_s) {
  const bool sending = kind == runtime::MessageRequest::Kind::kSend;
  const runtime::MessageRequest request{
      kind, peer, tag, {data.data, data.count * item_bytes(data.dtype)}};
  return submit(communicator, request, sending ? "send" : "recv", asynchronous, timeout_s,
                py::make_tuple(py::cast(data, py::return_value_policy::reference)), nullptr);
}

void bind_work(py::module_& module) {
  py::class_<Work>(module, "Work", "An operation that may still run.")
      .def("done", [](const Work& work) { return work.operation->done(); })
      .def("wait", &Work::wait, py::arg("timeout_s") = py::none(),
           "Block until done; raises what the operation raised, or TimeoutError if it is still "
           "running after `timeout_s` seconds.");
}

}  // namespace

void bind_communicator(py::module_& module) {
  using Kind = runtime::MessageRequest::Kind;
  bind_user_op(module);
  bind_work(module);
  py::class_<CommunicatorHandle, Shared>(module, "Communicator",
                                         "One rank's operations over its transports.")
      .def(py::init(&make), py::arg("rank"), py::arg("size"), py::arg("transports"),
           py::arg("timeout_s"), py::arg("names"))
      .def_property_readonly("rank", [](const Shared& self) { return self->native->rank(); })
      .def_property_readonly("size", [](const Shared& self) { return self->native->size(); })
      .def_readwrite("timeout_s", &CommunicatorHandle::timeout_s)
      .def("run", &run, py::arg("plan"), py::arg("input").none(true), py::arg("output").none(true),
           py::kw_only(), py::arg("dtype"), py::arg("op"), py::arg("counts"), py::arg("plan_key"),
           py::arg("count"), py::arg("segment_bytes") = transport::kSegmentBytesMax,
           py::arg("user_op") = py::none(), py::arg("asynchronous") = false,
           py::arg("timeout_s") = py::none())
      .def(
          "send",
          [](const Shared& self, BufferView& data, int dest, std::uint32_t tag, bool asynchronous,
             std::optional<double> timeout_s) {
            return message(self, Kind::kSend, data, dest, tag, asynchronous, timeout_s);
          },
          py::arg("data"), py::arg("dest"), py::arg("tag"), py::arg("asynchronous") = false,
          py::arg("timeout_s") = py::none())
      .def(
          "recv",
          [](const Shared& self, BufferView& data, int source, std::uint32_t tag, bool asynchronous,
             std::optional<double> timeout_s) {
            return message(self, Kind::kRecv, data, source, tag, asynchronous, timeout_s);
          },
          py::arg("data"), py::arg("source"), py::arg("tag"), py::arg("asynchronous") = false,
          py::arg("timeout_s") = py::none())
      .def(
          "failure",
          [](const Shared& self) -> std::optional<std::string> {
            refuse_inside_reduction("failure");
            const py::gil_scoped_release release;
            const Status status = self->native->failure();
            if (status.ok()) return std::nullopt;
            return status.message();
          },
          "Why the communicator can no longer be used, or None.")
      .def(
          "transport_of",
          [](const Shared& self, int peer) {
            if (peer < 0 || peer >= self->native->size()) {
              throw py::index_error("peer is " + std::to_string(peer) + ": expected a rank from " +
                                    "0 to " + std::to_string(self->native->size() - 1));
            }
            return std::string(self->native->transport_of(peer));
          },
          py::arg("peer"))
      .def("close", [](const Shared& self) {
        refuse_inside_reduction("close");
        self->close();
      });
}

}  // namespace pycoll::bindings
