#include "bindings/device/device_codes.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <string>
#include <utility>

#include "bindings/kernels/codec.h"
#include "device/kernels/program.h"
#include "device/memory/channel_memory.h"

namespace pycoll::bindings {
namespace {

template <typename T>
T* pointer_of(const py::handle& address) {
  return std::bit_cast<T*>(address.cast<std::uintptr_t>());
}

// The codec and the codes, which all steps have.
device::Coding begin_coding(device::Coding::Step step, const py::tuple& words) {
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

// An array is its address and the type of its elements.
void take_values(device::Coding* made, const py::tuple& words) {
  made->values = pointer_of<const std::byte>(words[5]);
  made->values_type = static_cast<DType>(words[6].cast<int>());
}
void take_result(device::Coding* made, const py::tuple& words, std::size_t at) {
  made->result = pointer_of<std::byte>(words[at]);
  made->result_type = static_cast<DType>(words[at + 1].cast<int>());
}

}  // namespace

std::optional<device::Coding> coding_of(const py::tuple& words) {
  using Step = device::Coding::Step;
  const auto kind = words[0].cast<std::string>();
  if (kind == "encode") {
    device::Coding made = begin_coding(Step::kEncode, words);
    take_values(&made, words);
    made.rests = pointer_of<float>(words[7]);
    made.parts = words[8].cast<std::uint32_t>();
    made.own = static_cast<std::uint32_t>(words[9].cast<std::int32_t>());
    made.chunk = words[10].cast<std::uint32_t>();
    made.codec.seed = kernels::seed_of_rank(made.codec.seed, words[11].cast<std::uint32_t>());
    return made;
  }
  if (kind == "fold") {
    device::Coding made = begin_coding(Step::kFold, words);
    take_values(&made, words);
    take_result(&made, words, 7);
    made.rows = words[9].cast<std::uint32_t>();
    made.own = words[10].cast<std::uint32_t>();
    made.divisor = words[11].cast<std::uint32_t>();
    return made;
  }
  if (kind == "total") {
    device::Coding made = begin_coding(Step::kTotal, words);
    take_values(&made, words);
    take_result(&made, words, 7);
    made.rows = words[9].cast<std::uint32_t>();
    return made;
  }
  if (kind == "correct") {
    device::Coding made = begin_coding(Step::kCorrect, words);
    take_values(&made, words);
    made.result = pointer_of<std::byte>(words[7]);
    made.factor = words[8].cast<float>();
    return made;
  }
  if (kind == "decode") {
    device::Coding made = begin_coding(Step::kDecode, words);
    take_result(&made, words, 5);
    made.parts = words[7].cast<std::uint32_t>();
    return made;
  }
  return std::nullopt;
}

std::optional<device::SparseCoding> sparse_coding_of(const py::tuple& words) {
  using Step = device::SparseCoding::Step;
  constexpr std::pair<const char*, Step> kSteps[] = {{"count", Step::kCount},
                                                     {"tally", Step::kTally},
                                                     {"gather", Step::kGather},
                                                     {"check", Step::kCheck},
                                                     {"spread", Step::kSpread}};
  const auto kind = words[0].cast<std::string>();
  const auto* found = std::find_if(std::begin(kSteps), std::end(kSteps),
                                   [&](const auto& one) { return kind == one.first; });
  if (found == std::end(kSteps)) return std::nullopt;
  device::SparseCoding made{};
  made.step = found->second;
  made.phase = words[1].cast<std::uint32_t>();
  made.codes = pointer_of<std::byte>(words[2]);
  made.number = words[3].cast<std::uint64_t>();
  if (made.step == Step::kCheck || made.step == Step::kSpread) {
    if (made.step == Step::kCheck) {
      made.rank = words[4].cast<std::uint32_t>();
    } else {
      made.result = pointer_of<float>(words[4]);
    }
    made.work = pointer_of<std::uint32_t>(words[5]);
    made.count = words[6].cast<std::uint64_t>();
    return made;
  }
  made.values = pointer_of<const std::byte>(words[4]);
  made.values_type = static_cast<DType>(words[5].cast<int>());
  made.rests = pointer_of<float>(words[6]);
  made.masks = pointer_of<float>(words[7]);
  made.work = pointer_of<std::uint32_t>(words[8]);
  made.count = words[9].cast<std::uint64_t>();
  return made;
}

void bind_limits(py::module_& module) {
  module.attr("DEVICE_PARTS_MAX") = device::kPartsMax;
  module.attr("DEVICE_MESSAGE_NUMBER") = device::kMessageNumber;
  module.attr("DEVICE_KEY_DIGITS") = device::kKeyDigits;
  module.attr("DEVICE_SPARSE_MAX") = device::kSparseCountMax;
  module.def("device_work_bytes", &device::work_bytes, py::arg("count"),
             "The memory in which kernels look for the largest of so many values.");
}

}  // namespace pycoll::bindings
