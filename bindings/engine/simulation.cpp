// The simulator for tests: real executors over a virtual network.
#include "engine/simulation.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings/core/errors.h"
#include "bindings/core/handle.h"
#include "bindings/engine/request.h"

namespace pycoll::bindings {
namespace {

struct SimulationHandle {
  engine::Simulation native;
  std::vector<py::object> arrays;  // kept until the simulation ends

  explicit SimulationHandle(transport::SimOptions options) : native(std::move(options)) {}
};

std::unique_ptr<SimulationHandle> make(int size, std::uint64_t seed, const std::string& mode,
                                       double horizon_s) {
  using transport::SimOptions;
  SimOptions options;
  options.size = size;
  options.seed = seed;
  if (mode == "swarm") {
    options = SimOptions::swarm(size, seed);
  } else if (mode == "faults") {
    options = SimOptions::swarm_with_faults(size, seed, nanoseconds(horizon_s));
  } else if (mode != "plain") {
    throw py::value_error("mode is \"" + mode + "\", it must be plain, swarm or faults");
  }
  return std::make_unique<SimulationHandle>(std::move(options));
}

std::size_t add(SimulationHandle& self, int rank, const RequestHandle& request, py::object input,
                py::object output, double timeout_s, double at_s, py::object residual) {
  const auto* in = input.is_none() ? nullptr : input.cast<const BufferView*>();
  const auto* out = output.is_none() ? nullptr : output.cast<const BufferView*>();
  const auto* rests = residual.is_none() ? nullptr : residual.cast<const BufferView*>();
  self.arrays.push_back(std::move(residual));
  self.arrays.push_back(std::move(input));
  self.arrays.push_back(std::move(output));
  return self.native.add(rank, with_memory(request, in, out, rests), nanoseconds(timeout_s),
                         nanoseconds(at_s));
}

std::size_t add_message(SimulationHandle& self, int rank, bool sending, py::object data, int peer,
                        std::uint32_t tag, double timeout_s, double at_s) {
  auto* view = data.cast<BufferView*>();
  self.arrays.push_back(std::move(data));
  using Kind = executor::MessageRequest::Kind;
  const executor::MessageRequest request{sending ? Kind::kSend : Kind::kRecv,
                                         peer,
                                         tag,
                                         {view->data, view->count * item_bytes(view->dtype)}};
  return self.native.add(rank, request, nanoseconds(timeout_s), nanoseconds(at_s));
}

void rethrow(const SimulationHandle& self, std::size_t operation) {
  raise_if_failed(self.native.outcome(operation), "simulated operation");
}

}  // namespace

void bind_simulation(py::module_& module) {
  using Handle = SimulationHandle;
  py::class_<Handle>(module, "Simulation",
                     "Real engines of all ranks over a virtual network; a function of its seed.")
      .def(py::init(&make), py::arg("size"), py::arg("seed"), py::arg("mode") = "plain",
           py::arg("horizon_s") = 0.001)
      .def("add", &add, py::arg("rank"), py::arg("request"), py::arg("input").none(true),
           py::arg("output").none(true), py::arg("timeout_s") = 10.0, py::arg("at_s") = 0.0,
           py::arg("residual") = py::none())
      .def("add_message", &add_message, py::arg("rank"), py::arg("sending"), py::arg("data"),
           py::arg("peer"), py::arg("tag"), py::arg("timeout_s") = 10.0, py::arg("at_s") = 0.0)
      .def("close_when_done", [](Handle& self, int rank) { self.native.close_when_done(rank); })
      .def(
          "run",
          [](Handle& self, double horizon_s) { return self.native.run(nanoseconds(horizon_s)); },
          py::arg("horizon_s"),
          "Step until every operation of every live rank has ended; False means a hang.")
      .def("dead", [](Handle& self, int rank) { return self.native.network().dead(rank); })
      .def("kill", [](Handle& self, int rank) { self.native.network().kill(rank); })
      .def("done",
           [](const Handle& self, std::size_t operation) { return self.native.done(operation); })
      .def("check", &rethrow, py::arg("operation"), "Raise the operation's error, if it failed.")
      .def(
          "trace", [](Handle& self) { return self.native.network().trace(); },
          "A hash of every event: equal seeds give equal traces.")
      .def("now_s",
           [](Handle& self) {
             return static_cast<double>(self.native.network().clock()->now()) * 1e-9;
           })
      .def("__str__", [](Handle& self) { return to_text(self.native.network().options()); });
}

}  // namespace pycoll::bindings
