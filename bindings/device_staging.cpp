// Arrays of devices that the host copies, and what operations are told of packing.
#include "bindings/device.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "bindings/bind.h"
#include "bindings/handle.h"
#include "device/binding.h"
#include "device/gpu.h"
#include "device/kernels.h"

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
  const auto way = kind == "pack" ? device::Copy::Kind::kPack : device::Copy::Kind::kUnpack;
  raise_if_failed(device::make_copy(way, strided, packed, item, &copy), "");
  return copy;
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
  for (const py::tuple& one : before) copies.before.push_back(copy_of(one));
  for (const py::tuple& one : after) copies.after.push_back(copy_of(one));
  return copies;
}

void bind_staging(py::module_& module) {
  py::class_<StagingHandle>(module, "DeviceStaging",
                            "Arrays of a device, copied to the host and back; both wait for the "
                            "stream, which must not be captured.")
      .def(py::init<int>(), py::arg("ordinal"))
      .def("check_stream", &StagingHandle::check_stream, py::arg("stream"))
      .def("read", &StagingHandle::read, py::arg("address"), py::arg("host"), py::arg("stream"),
           py::arg("before") = std::vector<py::tuple>())
      .def("write", &StagingHandle::write, py::arg("address"), py::arg("host"), py::arg("stream"),
           py::arg("after") = std::vector<py::tuple>());
}

}  // namespace pycoll::bindings
