#include "kernels/dispatch.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/core/errors.h"
#include "bindings/core/gil.h"
#include "bindings/kernels/codec.h"
#include "device/driver/driver.h"
#include "device/host_proxy/network_memory.h"
#include "device/kernels/kernels.h"

namespace pycoll::bindings {
namespace {

// Throws InvalidArgumentError unless `good`.
void require_combine(bool good, const std::string& message) {
  if (!good) raise_if_failed(Status::error(Code::kInvalidArgument, message), "combine");
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const kernels::Isa isa : kIsas) {
    if (kernels::available(isa)) names.emplace_back(kernels::name_of(isa));
  }
  return names;
}

std::vector<const void*> addresses_of(const BufferView& target,
                                      const std::vector<const BufferView*>& sources) {
  std::vector<const void*> addresses;
  for (const BufferView* source : sources) {
    require_combine(
        source->contiguous && source->dtype == target.dtype && source->count == target.count,
        "sources must be contiguous and have the target's dtype and count, which is " +
            std::to_string(target.count));
    const bool apart = source->data + source->bytes() <= target.data ||
                       target.data + target.bytes() <= source->data;
    require_combine(apart || source->data == target.data, "a source overlaps the target partly");
    addresses.push_back(source->data);
  }
  return addresses;
}

void combine(const BufferView& target, const std::vector<const BufferView*>& sources, int op,
             const std::string& isa, std::uint64_t times) {
  const auto reduction = static_cast<ReduceOp>(op);
  require_combine(target.contiguous && target.writable, "target must be contiguous and writable");
  require_combine(sources.size() >= 2 && sources.size() <= kernels::kSourcesMax,
                  "sources are " + std::to_string(sources.size()) + ", expected 2 to " +
                      std::to_string(kernels::kSourcesMax));
  const kernels::Combine kernel = kernels::combine_for(target.dtype, reduction, isa_of(isa));
  require_combine(static_cast<bool>(kernel),
                  "op is " + std::to_string(op) + ": no kernel for this dtype");
  const std::vector<const void*> addresses = addresses_of(target, sources);
  const ReleasedGil release;
  for (std::uint64_t time = 0; time < times; ++time) {
    kernel.function(target.data, addresses.data(), static_cast<int>(addresses.size()), target.count,
                    kernel.context);
  }
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def(
      "isa", [] { return std::string(kernels::name_of(kernels::best_isa())); },
      "The instruction set that the reduction kernels use: portable, avx2, avx512 or avx512fp16.");
  module.def(
      "device_summary", [] { return device::module_summary() + "; " + device::driver_summary(); },
      "The GPUs for which kernels were built, and the state of the driver, as text.");
  module.def(
      "device_rdma_summary", [] { return device::card_summary(); },
      "The access of network cards to the memory of each device, as text.");
  module.def("isas", &available_isas, "The instruction sets that run here, slowest first.");
  module.def(
      "defined",
      [](int dtype, int op) {
        return kernels::defined(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      },
      py::arg("dtype"), py::arg("op"), "Whether the reduction is defined for the dtype.");
  module.def(
      "combine", &combine, py::arg("target"), py::arg("sources"), py::arg("op"), py::arg("isa"),
      py::arg("times") = 1,
      "Fold 2 to 4 sources into `target` with the kernel of an instruction set, `times`\n"
      "times in a row; for benchmarks and comparisons of kernels. A source may be the target.");
}

}  // namespace pycoll::bindings
