// The steps of codecs on a device, as Python names them.
#include <bit>
#include <string>

#include "bindings/calls/codec.h"
#include "bindings/device/device.h"

namespace pycoll::bindings {
namespace {

template <typename T>
T* pointer_of(const py::handle& address) {
  return std::bit_cast<T*>(address.cast<std::uintptr_t>());
}

// The codec and the codes, which all steps have.
device::Coding begun(device::Coding::Step step, const py::tuple& words) {
  device::Coding made{};
  made.step = step;
  made.codec = words[1].cast<const BoundCodec&>().codec;
  made.codes = pointer_of<std::byte>(words[2]);
  made.stride = words[3].cast<std::uint64_t>();
  made.count = words[4].cast<std::uint64_t>();
  made.parts = 1;
  made.own = device::kNoPart;
  return made;
}

}  // namespace

std::optional<device::Coding> coding_of(const py::tuple& words) {
  using Step = device::Coding::Step;
  const auto kind = words[0].cast<std::string>();
  if (kind == "encode") {
    device::Coding made = begun(Step::kEncode, words);
    made.values = pointer_of<const float>(words[5]);
    made.rests = pointer_of<float>(words[6]);
    made.parts = words[7].cast<std::uint32_t>();
    made.own = static_cast<std::uint32_t>(words[8].cast<std::int32_t>());
    made.chunk = words[9].cast<std::uint32_t>();
    made.codec.seed = kernels::seed_of_rank(made.codec.seed, words[10].cast<std::uint32_t>());
    return made;
  }
  if (kind == "fold") {
    device::Coding made = begun(Step::kFold, words);
    made.values = pointer_of<const float>(words[5]);
    made.result = pointer_of<float>(words[6]);
    made.rows = words[7].cast<std::uint32_t>();
    made.own = words[8].cast<std::uint32_t>();
    made.divisor = words[9].cast<std::uint32_t>();
    return made;
  }
  if (kind == "decode") {
    device::Coding made = begun(Step::kDecode, words);
    made.result = pointer_of<float>(words[5]);
    made.parts = words[6].cast<std::uint32_t>();
    return made;
  }
  return std::nullopt;
}

}  // namespace pycoll::bindings
