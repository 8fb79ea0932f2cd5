#include "tests/cpp/device/emulator/emulated_kernels.h"

#include "base/assert.h"
#include "device/kernels/reductions.h"

namespace pycoll::testing {
namespace {

// The function, with the protocol as its type.
template <typename Function>
void with_protocol(device::Protocol protocol, const Function& function) {
  switch (protocol) {
    case device::Protocol::kLl:
      return function.template operator()<device::Ll>();
    case device::Protocol::kLl128:
      return function.template operator()<device::Ll128>();
    case device::Protocol::kSimple:
      return function.template operator()<device::Simple>();
    case device::Protocol::kPattern:
      return function.template operator()<device::Pattern>();
  }
}

}  // namespace

void execute(device::Protocol protocol, device::KernelKind kind, const device::Program& program,
             const device::Call& call, device::Shared& shared) {
  with_protocol(protocol, [&]<typename Protocol>() {
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
      case KernelKind::kList:
        break;
    }
    PYCOLL_ASSERT(false, "kernel %d takes a list", static_cast<int>(kind));
  });
}

void execute(device::Protocol protocol, const device::Program& program,
             const device::ListCall& call, device::Shared& shared) {
  with_protocol(protocol, [&]<typename Protocol>() {
    using namespace device;
    const Any reduction{program.dtype, program.op};
    Executor<Protocol, Any, ManyArrays>(program, call, reduction, shared).run();
  });
}

}  // namespace pycoll::testing
