// What the bindings of devices share.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <bit>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "device/driver.h"
#include "device/streams.h"

namespace pycoll::bindings {

namespace py = pybind11;

inline device::StreamHandle stream_of(std::uintptr_t handle) {
  return std::bit_cast<device::StreamHandle>(handle);
}

// The driver, started; throws InvalidArgumentError about the argument `name` where there is none.
const device::Driver& need_driver(const std::string& name);

// From ("pack" or "unpack", packed, item bytes, strided, lengths, strides), addresses and bytes; or
// from ("fill", packed, item bytes, count, value).
device::Copies copies_of(const std::vector<py::tuple>& before, const std::vector<py::tuple>& after);

// Something native with threads and a device, which belongs to the process that made it. In a
// forked child, which has neither, it is never destroyed. All with the GIL.
template <typename Native>
class OfProcess {
 public:
  OfProcess() = default;
  ~OfProcess() {
    try {
      discard();
    } catch (const std::exception&) {
      [[maybe_unused]] auto* left_behind = native_.release();
    }
  }
  OfProcess(const OfProcess&) = delete;
  OfProcess& operator=(const OfProcess&) = delete;

  // In a forked child.
  bool is_of_parent() const { return ::getpid() != pid_; }
  // ClosedError in a forked child. Requires: made() holds one.
  Native& get() const {
    if (is_of_parent()) {
      raise_if_failed(Status::error(Code::kClosed,
                                    "this communicator belongs to the parent process; a forked "
                                    "child cannot use its devices: start it with spawn"),
                      "");
    }
    return *native_;
  }
  // For whoever makes it.
  std::unique_ptr<Native>* made() { return &native_; }

 private:
  // What is under way is waited for, perhaps by ranks that are threads and want the GIL.
  void discard() {
    if (is_of_parent()) {
      [[maybe_unused]] auto* parents = native_.release();
      return;
    }
    const ReleasedGil release;
    native_.reset();
  }

  std::unique_ptr<Native> native_;
  const pid_t pid_ = ::getpid();
};

// DeviceStaging.
void bind_staging(py::module_& module);

}  // namespace pycoll::bindings
