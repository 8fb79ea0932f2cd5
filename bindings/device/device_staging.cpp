#include "bindings/device/device_staging.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <tuple>
#include <utility>

#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/core/handle.h"
#include "bindings/device/device_codes.h"
#include "bindings/device/of_process.h"
#include "device/binding.h"
#include "device/driver/gpu.h"
#include "device/host_proxy/staging.h"
#include "device/kernels/kernels.h"

namespace pycoll::bindings {
namespace {

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
  if (kind == "enter" || kind == "leave") {
    const auto way = kind == "enter" ? device::Copy::Kind::kEnter : device::Copy::Kind::kLeave;
    raise_if_failed(
        device::make_conversion(way, strided, packed, static_cast<DType>(one[6].cast<int>()),
                                static_cast<ReduceOp>(one[7].cast<int>()),
                                one[8].cast<std::uint32_t>(), &copy),
        "");
    return copy;
  }
  const auto way = kind == "pack" ? device::Copy::Kind::kPack : device::Copy::Kind::kUnpack;
  raise_if_failed(device::make_copy(way, strided, packed, item, &copy), "");
  return copy;
}

device::LocalStep step_of(const py::tuple& one) {
  if (const std::optional<device::Coding> coding = coding_of(one)) return *coding;
  if (const std::optional<device::SparseCoding> coding = sparse_coding_of(one)) return *coding;
  return copy_of(one);
}

using device::Staging;

// Host staging of messages, as Python holds it; keeps the host's communicator alive.
class StagingHandle {
 public:
  StagingHandle(const SharedHandle& host, int ordinal, std::uint64_t group) : host_(host) {
    Staging::Options options;
    const device::Driver& driver = need_driver("x");
    Status opened;
    {
      // Loading the kernels may wait for operations on streams that other threads have to release.
      const ReleasedGil release;
      opened = device::Gpu::open(driver, device::module_image(), ordinal, &options.gpu);
    }
    raise_if_failed(opened, "");
    engine::Communicator* native = host->native.get();
    options.host.start = [native](const executor::MessageRequest& request, Nanoseconds timeout) {
      return native->start(request, timeout);
    };
    options.host.failure = [native] { return native->failure(); };
    options.host.fail = [native](const Status& status, const std::string& operation) {
      (void)native->on_stream().fail(status, operation, 0);
    };
    options.rank = static_cast<std::uint32_t>(native->rank());
    options.group = group;
    raise_if_failed(Staging::open(std::move(options), native_.made()), "");
  }

  bool is_of_parent() const { return native_.is_of_parent(); }
  // Makes the call without the GIL; raises its failure.
  template <typename Call>
  void run(const Call& call) const {
    Staging& native = native_.get();
    Status status;
    {
      const ReleasedGil release;
      status = call(native);
    }
    raise_if_failed(status, "");
  }
  const SharedHandle& host() const { return host_; }

 private:
  SharedHandle host_;
  OfProcess<Staging> native_;
};

// Whether it is a send, other rank, tag, address, bytes, stream, and copies before and after.
using StagedWords = std::tuple<bool, int, std::uint32_t, std::uintptr_t, std::uint64_t,
                               std::uintptr_t, std::vector<py::tuple>, std::vector<py::tuple>>;

std::vector<std::shared_ptr<device::StagedMessage>> begin_messages(
    const StagingHandle& self, const std::vector<StagedWords>& words) {
  std::vector<Staging::Terms> all;
  all.reserve(words.size());
  for (const auto& [sends, peer, tag, address, bytes, stream, before, after] : words) {
    all.push_back({sends, peer, tag, address, bytes, self.host()->timeout(), stream_of(stream),
                   copies_of(before, after)});
  }
  std::vector<std::shared_ptr<device::StagedMessage>> messages;
  self.run([&](Staging& native) { return native.begin(all, &messages); });
  return messages;
}

bool message_passed(const StagingHandle& self, const device::StagedMessage& message) {
  bool is_past = false;
  self.run([&](const Staging& native) { return native.check_passed(message, &is_past); });
  return is_past;
}

}  // namespace

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

device::Copies copies_of(const std::vector<py::tuple>& before,
                         const std::vector<py::tuple>& after) {
  device::Copies copies;
  for (const py::tuple& one : before) copies.before.push_back(step_of(one));
  for (const py::tuple& one : after) copies.after.push_back(step_of(one));
  return copies;
}

void bind_staging(py::module_& module) {
  [[maybe_unused]] const py::class_<device::StagedMessage, std::shared_ptr<device::StagedMessage>>
      messages(module, "StagedMessage", "A message that goes through host staging.");
  py::class_<StagingHandle>(module, "DeviceStaging",
                            "Host staging of messages of one rank's device arrays.")
      .def(py::init<const SharedHandle&, int, std::uint64_t>(), py::arg("communicator"),
           py::arg("ordinal"), py::arg("group"))
      .def(
          "check_stream",
          [](const StagingHandle& self, std::uintptr_t stream) {
            self.run([&](Staging& native) { return native.check_stream(stream_of(stream)); });
          },
          py::arg("stream"))
      .def(
          "follow",
          [](const StagingHandle& self, std::uintptr_t stream, std::uintptr_t other) {
            self.run([&](Staging& native) {
              return native.follow(stream_of(stream), stream_of(other));
            });
          },
          py::arg("stream"), py::arg("other"), "Make a stream wait for the work in another one.")
      .def("begin", &begin_messages, py::arg("messages"),
           "Begin messages: (sends, peer, tag, address, bytes, stream, copies before, after).")
      .def(
          "join",
          [](const StagingHandle& self, device::StagedMessage& message, std::uintptr_t stream) {
            self.run([&](Staging& native) { return native.join(message, stream_of(stream)); });
          },
          py::arg("mark"), py::arg("stream"))
      .def("passed", &message_passed, py::arg("mark"))
      .def(
          "is_over",
          [](const StagingHandle&, const device::StagedMessage& message) {
            return Staging::is_over(message);
          },
          py::arg("mark"), "Whether the array is no longer in use.")
      .def(
          "check",
          [](const StagingHandle& self) {
            self.run([](const Staging& native) { return native.failure(); });
          },
          "Raise the error that ended it, if there is one.")
      .def(
          "leave",
          [](const StagingHandle& self, double patience_s) {
            if (self.is_of_parent()) return;
            self.run([&](Staging& native) {
              native.leave(nanoseconds(patience_s));
              return Status();
            });
          },
          py::arg("patience_s"))
      .def("close", [](const StagingHandle& self) {
        if (self.is_of_parent()) return;
        self.run([](Staging& native) {
          native.close();
          return Status();
        });
      });
}

}  // namespace pycoll::bindings
