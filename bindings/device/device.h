// Functions and types that the bindings of devices share.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <bit>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/core/bind.h"
#include "bindings/core/gil.h"
#include "device/driver/driver.h"
#include "device/driver/streams.h"

namespace pycoll::bindings {

namespace py = pybind11;

inline device::StreamHandle stream_of(std::uintptr_t handle) {
  return std::bit_cast<device::StreamHandle>(handle);
}

// Returns the initialized driver; throws InvalidArgumentError about the argument
// `name` if there is none.
const device::Driver& need_driver(const std::string& name);

// Converts tuples to steps. A copy is ("pack" or "unpack", packed, item bytes, strided, lengths,
// strides), where packed and strided are addresses; or ("fill", packed, item bytes, count, value).
// coding_of() and sparse_coding_of() read the others.
device::Copies copies_of(const std::vector<py::tuple>& before, const std::vector<py::tuple>& after);

// Reads a step of a codec; nothing for a copy. After its name a tuple has the _core.Codec, the
// address of the codes, the bytes from one part or row of them to the next, and the values of all
// parts. Then follow, with 0 for no memory (see device/kernels/codes/coding.h):
//
//   "encode"  values, type, rests, parts, the part to leave out or -1, chunk of part 0, rank
//   "fold"    values of the own row, type, result, type, rows, own row, divisor
//   "decode"  result, type, parts
//   "correct" values, type, result, factor
std::optional<device::Coding> coding_of(const py::tuple& words);

// Reads a step that chooses or adds up values (device/kernels/codes/sparse_coding.h); nothing for
// other steps. After its name a tuple has the phase, the address of the codes, and their number:
//
//   "count", "tally", "gather"  values, type, rests, masks, work, values of the array
//   "check"                     rank of the codes, work, values of the array
//   "spread"                    result, work, values of the array
std::optional<device::SparseCoding> sparse_coding_of(const py::tuple& words);

// A native object with threads and a device, which belongs to the process that created it. A forked
// child has neither thread nor device, and never destroys the object. All with the GIL.
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

  // Whether this process is a forked child.
  bool is_of_parent() const { return ::getpid() != pid_; }
  // Throws ClosedError in a forked child. Requires: made() holds an object.
  Native& get() const {
    if (is_of_parent()) {
      raise_if_failed(Status::error(Code::kClosed,
                                    "this communicator belongs to the parent process; a forked "
                                    "child cannot use its devices: start it with spawn"),
                      "");
    }
    return *native_;
  }
  // For the function that creates the object.
  std::unique_ptr<Native>* made() { return &native_; }

 private:
  // Waits for operations in progress, possibly for ranks that are threads and need the GIL.
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
// Numbers of the kernels: DEVICE_PARTS_MAX, DEVICE_KEY_DIGITS and the like.
void bind_limits(py::module_& module);

}  // namespace pycoll::bindings
