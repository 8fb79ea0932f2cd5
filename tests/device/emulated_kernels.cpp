#include "emulated_kernels.h"

#include "device/reductions.h"

namespace pycoll::testing {

void execute(device::Protocol protocol, device::KernelKind kind, const device::Program& program,
             const device::Call& call, device::Shared& shared) {
  const auto with = [&]<typename Protocol>() {
    using namespace device;
    switch (kind) {
      case KernelKind::kAny:
        return Executor<Protocol, Any>(program, call, Any{program.dtype, program.op}, shared).run();
      case KernelKind::kSumFloat32:
        return Executor<Protocol, FixedSum<Real<float>>>(program, call, {}, shared).run();
      case KernelKind::kSumBFloat16:
        return Executor<Protocol, FixedSum<BFloat16>>(program, call, {}, shared).run();
      case KernelKind::kSumFloat16:
        return Executor<Protocol, FixedSum<Float16>>(program, call, {}, shared).run();
    }
  };
  switch (protocol) {
    case device::Protocol::kLl:
      return with.operator()<device::Ll>();
    case device::Protocol::kLl128:
      return with.operator()<device::Ll128>();
    case device::Protocol::kSimple:
      return with.operator()<device::Simple>();
  }
}

}  // namespace pycoll::testing
