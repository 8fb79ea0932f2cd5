// Communicators on device memory, which Python names by its address.
#include <pybind11/stl.h>
#include <unistd.h>

#include <bit>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays/dlpack_reader.h"
#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/core/handle.h"
#include "bindings/device/device_codes.h"
#include "bindings/device/device_staging.h"
#include "bindings/device/of_process.h"
#include "bindings/engine/plan.h"
#include "bindings/engine/request.h"
#include "bindings/engine/transport.h"
#include "device/device_communicator.h"

namespace pycoll::bindings {
namespace {

using device::Mark;

int device_of(std::uintptr_t address, const std::string& name) {
  int ordinal = 0;
  raise_if_failed(
      device::locate(need_driver(name), std::bit_cast<const void*>(address), name, &ordinal), "");
  return ordinal;
}

// Calls from native code to Python during a native call. An exception ends that call and is raised.
class Questions {
 public:
  // `refusal`: the error that the native call gets after an exception.
  explicit Questions(const char* refusal) : refusal_(refusal) {}

  template <typename Question>
  Status ask(const Question& question) {
    const TakenGil gil;
    try {
      question();
      return Status();
    } catch (const std::exception&) {
      raised_ = std::current_exception();
      return Status::error(Code::kInterrupted, refusal_);
    }
  }
  // The result must not outlive this object and `exchange`.
  device::Exchange over(const py::function& exchange) {
    return [this, &exchange](const std::string& mine, std::vector<std::string>* all) {
      return ask(
          [&] { *all = call_python(exchange, py::bytes(mine)).cast<std::vector<std::string>>(); });
    };
  }
  // Makes the call without the GIL; raises the exception of a question, or the call's failure.
  template <typename Call>
  void run(const Call& call) {
    Status status;
    {
      const ReleasedGil release;
      status = call();
    }
    if (raised_ != nullptr) std::rethrow_exception(raised_);
    raise_if_failed(status, "");
  }

 private:
  const char* refusal_;
  std::exception_ptr raised_;
};

// A communicator's device side, as Python holds it; keeps the host's communicator alive.
class DeviceHandle {
 public:
  DeviceHandle(const SharedHandle& host, std::vector<std::string> names, int ordinal,
               std::uint64_t machine, std::uint64_t process, std::uint64_t memory_max,
               const std::string& protocol, bool direct, const py::function& exchange,
               const py::function& wires)
      : host_(host) {
    const device::Driver& driver = need_driver("x");
    device::Options options;
    Status opened;
    {
      // Loading the kernels may wait for operations on streams that other threads have to release.
      const ReleasedGil release;
      opened = device::Gpu::open(driver, device::module_image(), ordinal, &options.gpu);
    }
    raise_if_failed(opened, "");
    options.membership = {static_cast<std::uint32_t>(host->native->rank()),
                          static_cast<std::uint32_t>(host->native->size()),
                          std::move(names),
                          machine,
                          process,
                          memory_max,
                          device::protocol_named(protocol),
                          direct,
                          {}};
    engine::Communicator* native = host->native.get();
    options.host.count = [native](bool captured) { native->on_stream().count(captured); };
    options.host.look = [native](const std::string& operation, bool patient) {
      return native->on_stream().look(operation, patient);
    };
    options.host.fail = [native](const Status& status, const std::string& operation, double after) {
      return native->on_stream().fail(status, operation, after);
    };
    options.clock = std::make_shared<SteadyClock>();
    options.timeout = host->timeout();
    open(std::move(options), exchange, wires);
  }

  device::Communicator& native() const { return native_.get(); }
  const SharedHandle& host() const { return host_; }
  bool is_of_parent() const { return native_.is_of_parent(); }

 private:
  void open(device::Options options, const py::function& exchange, const py::function& wires) {
    Questions questions("the ranks cannot tell each other their devices");
    options.membership.wires = [&](std::vector<std::shared_ptr<transport::Transport>>* made) {
      return questions.ask([&] {
        for (const py::handle one : wires()) {
          made->push_back(one.cast<const TransportHandle&>().transport);
        }
      });
    };
    questions.run([&] {
      return device::Communicator::open(std::move(options), questions.over(exchange),
                                        native_.made());
    });
  }

  SharedHandle host_;
  OfProcess<device::Communicator> native_;
};

// Addresses of input and output, and the bytes up to the end of this array.
using PartOfList = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t>;

// Address and bytes.
using MemoryWords = std::pair<std::uintptr_t, std::uint64_t>;

std::shared_ptr<Mark> run_on_device(const DeviceHandle& self, const RequestHandle& handle,
                                    const MemoryWords& input, const MemoryWords& output,
                                    std::uint32_t lanes, std::uintptr_t stream, bool on_stream,
                                    const std::vector<PartOfList>& parts,
                                    const std::vector<py::tuple>& before,
                                    const std::vector<py::tuple>& after) {
  executor::CollectiveRequest request = handle.request;
  request.input = {std::bit_cast<const std::byte*>(input.first), input.second};
  request.output = {std::bit_cast<std::byte*>(output.first), output.second};
  for (const auto& [source, target, end] : parts) {
    request.parts.push_back(
        {std::bit_cast<const std::byte*>(source), std::bit_cast<std::byte*>(target), end});
  }
  const device::Copies copies = copies_of(before, after);
  std::shared_ptr<Mark> done;
  Status status;
  device::Communicator& native = self.native();
  native.watch_thread().set_timeout(self.host()->timeout());
  {
    const ReleasedGil release;
    status = on_stream ? native.launch_on_stream(request, lanes, stream_of(stream), &done, copies)
                       : native.launch(request, lanes, stream_of(stream), copies);
  }
  raise_if_failed(status, name_of(request.descriptor.collective), self.host()->native->names());
  return done;
}

// Whether it is a send, then other rank, tag, address and bytes.
using MessageWords = std::tuple<bool, std::uint32_t, std::uint32_t, std::uintptr_t, std::uint64_t>;

std::shared_ptr<Mark> run_messages(const DeviceHandle& self, const PlanHandle& plan,
                                   const std::vector<MessageWords>& words, std::uintptr_t stream,
                                   bool on_stream, const std::vector<py::tuple>& before,
                                   const std::vector<py::tuple>& after) {
  device::P2PBatch messages{plan.image, {}};
  for (const auto& [sends, peer, tag, address, bytes] : words) {
    messages.all.push_back({sends, peer, tag, std::bit_cast<std::byte*>(address), bytes});
  }
  const device::Copies copies = copies_of(before, after);
  std::shared_ptr<Mark> done;
  Status status;
  device::Communicator& native = self.native();
  native.watch_thread().set_timeout(self.host()->timeout());
  {
    const ReleasedGil release;
    status =
        native.launch_messages(messages, stream_of(stream), on_stream ? &done : nullptr, copies);
  }
  raise_if_failed(status, "");
  return done;
}

bool has_passed(const DeviceHandle& self, const Mark& mark) {
  bool is_past = false;
  raise_if_failed(self.native().marks().check_passed(mark, &is_past), "wait");
  return is_past;
}

std::shared_ptr<Mark> mark_stream(const DeviceHandle& self, std::uintptr_t stream) {
  std::shared_ptr<Mark> made;
  raise_if_failed(self.native().marks().mark(stream_of(stream), &made), "");
  return made;
}

std::uint64_t capture_on(const DeviceHandle& self, std::uintptr_t stream) {
  const device::Gpu::Current current(self.native().gpu());
  std::uint64_t capture = 0;
  raise_if_failed(current.status(), "");
  raise_if_failed(device::capture_of(self.native().gpu(), stream_of(stream), &capture), "");
  return capture;
}

std::uintptr_t scratch_memory(const DeviceHandle& self, std::size_t bytes) {
  device::Communicator& native = self.native();
  device::Address made = 0;
  Status status;
  {
    const ReleasedGil release;
    status = native.step_memory().scratch(bytes, &made);
  }
  raise_if_failed(status, "");
  return made;
}

py::bytes read_memory(const DeviceHandle& self, std::uintptr_t address, std::size_t bytes) {
  std::string made(bytes, '\0');
  device::Communicator& native = self.native();
  Status status;
  {
    const ReleasedGil release;
    status = native.step_memory().read(made.data(), address, bytes);
  }
  raise_if_failed(status, "");
  return py::bytes(made);
}

void write_memory(const DeviceHandle& self, std::uintptr_t address, const std::string& bytes) {
  device::Communicator& native = self.native();
  Status status;
  {
    const ReleasedGil release;
    status = native.step_memory().write(address, bytes.data(), bytes.size());
  }
  raise_if_failed(status, "");
}

std::optional<std::string> failure_of_device(const DeviceHandle& self) {
  const Status status = self.native().watch_thread().failure();
  return status.ok() ? std::nullopt : std::optional<std::string>(status.message());
}

// Returns for each array its number, -1 if it has none, and whether peers can write to it.
// `exchange` is as in the constructor; its exceptions are raised here.
std::vector<std::pair<int, bool>> register_arrays(
    const DeviceHandle& self, const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& arrays,
    const py::function& exchange) {
  std::vector<device::Registry::Array> entering;
  entering.reserve(arrays.size());
  for (const auto& [address, bytes] : arrays) entering.push_back({address, bytes});
  std::vector<device::Registry::Entered> entered;
  device::Communicator& native = self.native();
  Questions questions("the ranks cannot tell each other their arrays");
  questions.run(
      [&] { return native.arrays().enter(questions.over(exchange), entering, &entered); });
  std::vector<std::pair<int, bool>> numbers;
  for (const device::Registry::Entered& one : entered) {
    const bool has_number = one.number != device::kNotRegistered;
    numbers.emplace_back(has_number ? static_cast<int>(one.number) : -1, one.is_reached);
  }
  return numbers;
}

void lapse_array(const DeviceHandle& self, std::uint32_t number) {
  if (self.is_of_parent()) return;
  device::Communicator& native = self.native();
  const ReleasedGil release;
  // A device that does not accept this is broken; the next operation reports it.
  (void)native.arrays().lapse(number);
}

std::vector<std::uint32_t> arrays_let_go(const DeviceHandle& self) {
  if (self.is_of_parent()) return {};
  device::Communicator& native = self.native();
  const ReleasedGil release;
  return native.arrays().let_go();
}

void close_device(const DeviceHandle& self) {
  device::Communicator& native = self.native();
  const ReleasedGil release;
  native.close();
}

}  // namespace

void bind_devices(py::module_& module) {
  [[maybe_unused]] const py::class_<Mark, std::shared_ptr<Mark>> marks(module, "DeviceMark",
                                                                       "A position in a stream.");
  py::class_<DeviceHandle>(module, "DeviceCommunicator",
                           "One rank's operations on its device; all ranks create it together.")
      .def(py::init<const SharedHandle&, std::vector<std::string>, int, std::uint64_t,
                    std::uint64_t, std::uint64_t, const std::string&, bool, const py::function&,
                    const py::function&>(),
           py::arg("communicator"), py::arg("names"), py::arg("ordinal"), py::arg("machine"),
           py::arg("process"), py::arg("memory_max"), py::arg("protocol"), py::arg("direct"),
           py::arg("exchange"), py::arg("wires"))
      .def(
          "warnings", [](const DeviceHandle& self) { return self.native().warnings(); },
          "Why some devices cannot reach each other although they should; same on all ranks.")
      .def("run", &run_on_device, py::arg("request"), py::arg("input"), py::arg("output"),
           py::kw_only(), py::arg("lanes"), py::arg("stream"), py::arg("on_stream") = false,
           py::arg("parts") = std::vector<PartOfList>(),
           py::arg("before") = std::vector<py::tuple>(),
           py::arg("after") = std::vector<py::tuple>(),
           "Launch an operation. Memory is (address, bytes); for several arrays the address of the "
           "first and the bytes of all. Returns a mark after the operation if on_stream.")
      .def("run_messages", &run_messages, py::arg("plan"), py::arg("messages"), py::kw_only(),
           py::arg("stream"), py::arg("on_stream") = false,
           py::arg("before") = std::vector<py::tuple>(),
           py::arg("after") = std::vector<py::tuple>(),
           "Launch messages (sends, peer, tag, address, bytes): sent ones by peer, then received "
           "ones by peer. Returns a mark after them if on_stream.")
      .def_property_readonly("message_lanes",
                             [](const DeviceHandle& self) { return self.native().message_lanes(); })
      .def("mark", &mark_stream, py::arg("stream"))
      .def(
          "join",
          [](const DeviceHandle& self, const Mark& mark, std::uintptr_t stream) {
            raise_if_failed(self.native().marks().join(mark, stream_of(stream)), "wait");
          },
          py::arg("mark"), py::arg("stream"))
      .def("passed", &has_passed, py::arg("mark"))
      .def("capture_of", &capture_on, py::arg("stream"))
      .def("register", &register_arrays, py::arg("arrays"), py::arg("exchange"),
           "Register arrays (address, bytes) that peers may write to. Returns for each its number, "
           "-1 if it has none, and whether some peer can write to it. All ranks call it together.")
      .def("lapse", &lapse_array, py::arg("number"))
      .def("let_go", &arrays_let_go,
           "Numbers that have lapsed and whose arrays no peer writes to any longer.")
      .def("scratch", &scratch_memory, py::arg("nbytes"))
      .def("read", &read_memory, py::arg("address"), py::arg("nbytes"),
           "Copy memory of the device that no kernel uses meanwhile; write() copies to it.")
      .def("write", &write_memory, py::arg("address"), py::arg("data"))
      .def("failure", &failure_of_device)
      .def("close", &close_device);
  bind_staging(module);
  bind_limits(module);
  module.def(
      "device_tensor", &device_tensor, py::arg("capsule"), py::arg("name"),
      "Read the memory on a CUDA device from a DLPack capsule, and consume the capsule. "
      "Returns address, shape, strides in bytes, dtype, whether it is writable, owner, device.");
  module.def("device_of", &device_of, py::arg("address"), py::arg("name") = "x",
             "The number of the device that has this memory.");
}

}  // namespace pycoll::bindings
