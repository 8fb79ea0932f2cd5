// Devices: communicators on device memory, which Python names by its address.
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/exporters.h"
#include "bindings/handle.h"
#include "bindings/plan.h"
#include "bindings/request.h"
#include "device/communicator.h"

namespace pycoll::bindings {
namespace {

using device::Mark;

device::StreamHandle stream_of(std::uintptr_t handle) {
  return std::bit_cast<device::StreamHandle>(handle);
}

// The driver, started; throws InvalidArgumentError about the argument `name` where there is none.
const device::Driver& need_driver(const std::string& name) {
  std::string why;
  const device::Driver* driver = device::driver(&why);
  if (driver == nullptr) {
    raise_if_failed(
        Status::error(Code::kInvalidArgument, name + " is on a CUDA device, but " + why), "");
  }
  raise_if_failed(device::check(*driver, driver->init(0), "start"), "");
  return *driver;
}

int device_of(std::uintptr_t address, const std::string& name) {
  int ordinal = 0;
  raise_if_failed(
      device::locate(need_driver(name), std::bit_cast<const void*>(address), name, &ordinal), "");
  return ordinal;
}

// A communicator's devices, as Python holds them; its host's communicator lives as long.
class DeviceHandle {
 public:
  DeviceHandle(const SharedHandle& host, std::vector<std::string> names, int ordinal,
               std::uint64_t machine, std::uint64_t process, std::uint64_t memory_max, bool direct,
               const py::function& exchange, const py::function& wires)
      : host_(host) {
    const device::Driver& driver = need_driver("x");
    device::Options options;
    raise_if_failed(device::Gpu::open(driver, device::module_image(), ordinal, &options.gpu), "");
    options.membership = {static_cast<std::uint32_t>(host->native->rank()),
                          static_cast<std::uint32_t>(host->native->size()),
                          std::move(names),
                          machine,
                          process,
                          memory_max,
                          direct,
                          {}};
    runtime::Communicator* native = host->native.get();
    options.host.count = [native](bool captured) { native->count_beside(captured); };
    options.host.look = [native](const std::string& operation, bool patient) {
      return native->look_beside(operation, patient);
    };
    options.host.fail = [native](const Status& status, const std::string& operation, double after) {
      return native->fail_beside(status, operation, after);
    };
    options.clock = std::make_shared<SteadyClock>();
    options.timeout = host->timeout();
    open(std::move(options), exchange, wires);
  }
  ~DeviceHandle() {
    try {
      discard();
    } catch (const std::exception&) {
      [[maybe_unused]] auto* left_behind = native_.release();
    }
  }
  DeviceHandle(const DeviceHandle&) = delete;
  DeviceHandle& operator=(const DeviceHandle&) = delete;

  device::Communicator& native() const {
    if (::getpid() != pid_) {
      raise_if_failed(Status::error(Code::kClosed,
                                    "this communicator belongs to the parent process; a forked "
                                    "child cannot use its devices: start it with spawn"),
                      "");
    }
    return *native_;
  }
  const SharedHandle& host() const { return host_; }

 private:
  // What it launched is waited for, perhaps by ranks that are threads and want the GIL.
  void discard() {
    if (::getpid() != pid_) {
      // A forked child has neither the thread that watches nor the devices.
      [[maybe_unused]] auto* parents = native_.release();
      return;
    }
    const py::gil_scoped_release release;
    native_.reset();
  }

  // What Python raises ends the exchange, and is raised here.
  void open(device::Options options, const py::function& exchange, const py::function& wires) {
    std::exception_ptr raised;
    const auto ask = [&](const auto& question) {
      const py::gil_scoped_acquire gil;
      try {
        question();
        return Status();
      } catch (const std::exception&) {
        raised = std::current_exception();
        return Status::error(Code::kInterrupted, "the ranks cannot tell each other their devices");
      }
    };
    const auto tell = [&](const std::string& mine, std::vector<std::string>* all) {
      return ask([&] { *all = exchange(py::bytes(mine)).cast<std::vector<std::string>>(); });
    };
    options.membership.wires = [&](std::vector<std::shared_ptr<transport::Transport>>* made) {
      return ask([&] {
        for (const py::handle one : wires()) {
          made->push_back(one.cast<const TransportHandle&>().transport);
        }
      });
    };
    Status status;
    {
      const py::gil_scoped_release release;
      status = device::Communicator::open(std::move(options), tell, &native_);
    }
    if (raised != nullptr) std::rethrow_exception(raised);
    raise_if_failed(status, "");
  }

  SharedHandle host_;
  std::unique_ptr<device::Communicator> native_;
  const pid_t pid_ = ::getpid();
};

runtime::CollectiveRequest device_request(const PlanHandle& plan, const py::tuple& input,
                                          const py::tuple& output, Terms terms) {
  runtime::CollectiveRequest request = make_request(plan, nullptr, nullptr, std::move(terms), {});
  request.input = {std::bit_cast<const std::byte*>(input[0].cast<std::uintptr_t>()),
                   input[1].cast<std::uint64_t>()};
  request.output = {std::bit_cast<std::byte*>(output[0].cast<std::uintptr_t>()),
                    output[1].cast<std::uint64_t>()};
  return request;
}

// Addresses of input and output, and the bytes up to the array's end.
using PartOfList = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t>;

// From ("pack" or "unpack", packed, item bytes, strided, lengths, strides), addresses and bytes; or
// from ("fill", packed, item bytes, count, value).
device::Copy copy_of(const py::tuple& one) {
  const auto kind = one[0].cast<std::string>();
  auto* packed = std::bit_cast<std::byte*>(one[1].cast<std::uintptr_t>());
  const auto item = one[2].cast<std::uint32_t>();
  if (kind == "fill") {
    const auto value = one[4].cast<std::string>();
    device::Pack pack{0, 0};
    std::memcpy(&pack, value.data(), std::min(value.size(), sizeof(pack)));
    return device::make_fill(packed, one[3].cast<std::uint64_t>(), pack, item);
  }
  const device::Strided strided{std::bit_cast<std::byte*>(one[3].cast<std::uintptr_t>()),
                                one[4].cast<std::vector<std::uint64_t>>(),
                                one[5].cast<std::vector<std::int64_t>>()};
  device::Copy copy{};
  const auto way = kind == "pack" ? device::Copy::Kind::kPack : device::Copy::Kind::kUnpack;
  raise_if_failed(device::make_copy(way, strided, packed, item, &copy), "");
  return copy;
}

device::Copies copies_of(const std::vector<py::tuple>& before,
                         const std::vector<py::tuple>& after) {
  device::Copies copies;
  for (const py::tuple& one : before) copies.before.push_back(copy_of(one));
  for (const py::tuple& one : after) copies.after.push_back(copy_of(one));
  return copies;
}

std::shared_ptr<Mark> run_on_device(const DeviceHandle& self, const PlanHandle& plan,
                                    const py::tuple& input, const py::tuple& output, int dtype,
                                    int op, std::vector<std::uint64_t> counts,
                                    std::uint64_t plan_key, std::uint64_t count,
                                    std::uint32_t lanes, std::uintptr_t stream, bool beside,
                                    const std::vector<PartOfList>& parts,
                                    const std::vector<py::tuple>& before,
                                    const std::vector<py::tuple>& after) {
  runtime::CollectiveRequest request =
      device_request(plan, input, output,
                     {dtype, op, std::move(counts), plan_key, count, transport::kSegmentBytesMax});
  for (const auto& [source, target, end] : parts) {
    request.parts.push_back(
        {std::bit_cast<const std::byte*>(source), std::bit_cast<std::byte*>(target), end});
  }
  const device::Copies copies = copies_of(before, after);
  std::shared_ptr<Mark> done;
  Status status;
  device::Communicator& native = self.native();
  native.set_timeout(self.host()->timeout());
  {
    const py::gil_scoped_release release;
    status = beside ? native.launch_beside(request, lanes, stream_of(stream), &done, copies)
                    : native.launch(request, lanes, stream_of(stream), copies);
  }
  raise_if_failed(status, name_of(request.descriptor.collective));
  return done;
}

// Whether it sends, the other rank, tag, address and bytes.
using MessageWords = std::tuple<bool, std::uint32_t, std::uint32_t, std::uintptr_t, std::uint64_t>;

std::shared_ptr<Mark> run_messages(const DeviceHandle& self, const PlanHandle& plan,
                                   const std::vector<MessageWords>& words, std::uintptr_t stream,
                                   bool beside, const std::vector<py::tuple>& before,
                                   const std::vector<py::tuple>& after) {
  device::Messages messages{plan.image, {}};
  for (const auto& [sends, peer, tag, address, bytes] : words) {
    messages.all.push_back({sends, peer, tag, std::bit_cast<std::byte*>(address), bytes});
  }
  const device::Copies copies = copies_of(before, after);
  std::shared_ptr<Mark> done;
  Status status;
  device::Communicator& native = self.native();
  native.set_timeout(self.host()->timeout());
  {
    const py::gil_scoped_release release;
    status = native.launch_messages(messages, stream_of(stream), beside ? &done : nullptr, copies);
  }
  raise_if_failed(status, "");
  return done;
}

// A device whose memory the host reads and writes, without any other rank.
class StagingHandle {
 public:
  explicit StagingHandle(int ordinal) {
    raise_if_failed(device::Gpu::open(need_driver("x"), device::module_image(), ordinal, &gpu_),
                    "");
  }

  void check_stream(std::uintptr_t stream) const {
    const device::Gpu::Current current(*gpu_);
    raise_if_failed(current.status(), "");
    raise_if_failed(device::check_uncaptured(*gpu_, stream_of(stream)), "");
  }
  void read(std::uintptr_t address, const py::buffer& to, std::uintptr_t stream,
            const std::vector<py::tuple>& before) const {
    const py::buffer_info host = to.request(true);
    const device::Copies copies = copies_of(before, {});
    const auto bytes = static_cast<std::size_t>(host.size * host.itemsize);
    raise_if_failed(run([&] {
                      return device::read_in_stream(*gpu_, stream_of(stream), copies.before,
                                                    address, host.ptr, bytes);
                    }),
                    "");
  }
  void write(std::uintptr_t address, const py::buffer& from, std::uintptr_t stream,
             const std::vector<py::tuple>& after) const {
    const py::buffer_info host = from.request();
    const device::Copies copies = copies_of({}, after);
    const auto bytes = static_cast<std::size_t>(host.size * host.itemsize);
    raise_if_failed(run([&] {
                      return device::write_in_stream(*gpu_, stream_of(stream), copies.after,
                                                     address, host.ptr, bytes);
                    }),
                    "");
  }

 private:
  template <typename Move>
  Status run(const Move& move) const {
    const py::gil_scoped_release release;
    const device::Gpu::Current current(*gpu_);
    return current.status().ok() ? move() : current.status();
  }

  std::shared_ptr<const device::Gpu> gpu_;
};

bool has_passed(const DeviceHandle& self, const Mark& mark) {
  bool is_past = false;
  raise_if_failed(self.native().passed(mark, &is_past), "wait");
  return is_past;
}

std::shared_ptr<Mark> mark_stream(const DeviceHandle& self, std::uintptr_t stream) {
  std::shared_ptr<Mark> made;
  raise_if_failed(self.native().mark(stream_of(stream), &made), "");
  return made;
}

std::uint64_t capture_on(const DeviceHandle& self, std::uintptr_t stream) {
  const device::Gpu::Current current(self.native().gpu());
  std::uint64_t capture = 0;
  raise_if_failed(current.status(), "");
  raise_if_failed(device::capture_of(self.native().gpu(), stream_of(stream), &capture), "");
  return capture;
}

std::optional<std::string> failure_of_device(const DeviceHandle& self) {
  const Status status = self.native().failure();
  return status.ok() ? std::nullopt : std::optional<std::string>(status.message());
}

void close_device(const DeviceHandle& self) {
  device::Communicator& native = self.native();
  const py::gil_scoped_release release;
  native.close();
}

}  // namespace

void bind_devices(py::module_& module) {
  [[maybe_unused]] const py::class_<Mark, std::shared_ptr<Mark>> marks(module, "DeviceMark",
                                                                       "A place in a stream.");
  py::class_<DeviceHandle>(module, "DeviceCommunicator",
                           "One rank's operations on its device; made by all ranks together.")
      .def(py::init<const SharedHandle&, std::vector<std::string>, int, std::uint64_t,
                    std::uint64_t, std::uint64_t, bool, const py::function&, const py::function&>(),
           py::arg("communicator"), py::arg("names"), py::arg("ordinal"), py::arg("machine"),
           py::arg("process"), py::arg("memory_max"), py::arg("direct"), py::arg("exchange"),
           py::arg("wires"))
      .def(
          "warnings", [](const DeviceHandle& self) { return self.native().warnings(); },
          "Why devices are out of reach that should not be; alike on all ranks.")
      .def("run", &run_on_device, py::arg("plan"), py::arg("input"), py::arg("output"),
           py::kw_only(), py::arg("dtype"), py::arg("op"), py::arg("counts"), py::arg("plan_key"),
           py::arg("count"), py::arg("lanes"), py::arg("stream"), py::arg("beside") = false,
           py::arg("parts") = std::vector<PartOfList>(),
           py::arg("before") = std::vector<py::tuple>(),
           py::arg("after") = std::vector<py::tuple>(),
           "Launch; memory is (address, bytes), of several arrays the first one's address and all "
           "bytes. A mark behind the operation if it runs beside.")
      .def("run_messages", &run_messages, py::arg("plan"), py::arg("messages"), py::kw_only(),
           py::arg("stream"), py::arg("beside") = false,
           py::arg("before") = std::vector<py::tuple>(),
           py::arg("after") = std::vector<py::tuple>(),
           "Launch messages: (sends, peer, tag, address, bytes), sent ones by peer, then received "
           "ones by peer. A mark behind them if they run beside.")
      .def_property_readonly("message_lanes",
                             [](const DeviceHandle& self) { return self.native().message_lanes(); })
      .def("mark", &mark_stream, py::arg("stream"))
      .def(
          "join",
          [](const DeviceHandle& self, const Mark& mark, std::uintptr_t stream) {
            raise_if_failed(self.native().join(mark, stream_of(stream)), "wait");
          },
          py::arg("mark"), py::arg("stream"))
      .def("passed", &has_passed, py::arg("mark"))
      .def("capture_of", &capture_on, py::arg("stream"))
      .def("failure", &failure_of_device)
      .def("close", &close_device);
  py::class_<StagingHandle>(module, "DeviceStaging",
                            "Arrays of a device, copied to the host and back; both wait for the "
                            "stream, which must not be captured.")
      .def(py::init<int>(), py::arg("ordinal"))
      .def("check_stream", &StagingHandle::check_stream, py::arg("stream"))
      .def("read", &StagingHandle::read, py::arg("address"), py::arg("host"), py::arg("stream"),
           py::arg("before") = std::vector<py::tuple>())
      .def("write", &StagingHandle::write, py::arg("address"), py::arg("host"), py::arg("stream"),
           py::arg("after") = std::vector<py::tuple>());
  module.def("device_tensor", &device_tensor, py::arg("capsule"), py::arg("name"),
             "What a DLPack capsule says of memory on a CUDA device, which it gives away: address, "
             "shape, strides in bytes, dtype, whether it is writable, owner, and device.");
  module.attr("DEVICE_PARTS_MAX") = device::kPartsMax;
  module.attr("DEVICE_MESSAGE_NUMBER") = device::kMessageNumber;
  module.def("device_of", &device_of, py::arg("address"), py::arg("name") = "x",
             "The number of the device whose memory this is.");
}

}  // namespace pycoll::bindings
