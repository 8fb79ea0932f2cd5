// The kernels by name, and the module that holds them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/types.h"
#include "device/kernels/program.h"

namespace pycoll::device {

// One kernel per protocol and kind. Sums of the types that training uses have kernels of their own.
enum class KernelKind : std::uint8_t {
  kAny = 0,
  kSumFloat32 = 1,
  kSumBFloat16 = 2,
  kSumFloat16 = 3,
  kList = 4,  // any reduction, on several arrays
};
inline constexpr std::uint32_t kKernelKindCount = 5;

// The fastest kernel with the right bits. `reduces`: whether rows combine at all. Any fixed kernel
// serves operations that only copy, since it has more bytes in flight.
constexpr KernelKind kind_of(bool reduces, DType dtype, ReduceOp op) {
  if (!reduces) return KernelKind::kSumFloat32;
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg) return KernelKind::kAny;
  if (dtype == DType::kFloat32) return KernelKind::kSumFloat32;
  if (dtype == DType::kBFloat16) return KernelKind::kSumBFloat16;
  if (dtype == DType::kFloat16) return KernelKind::kSumFloat16;
  return KernelKind::kAny;
}

// "ll", "ll128", "simple", "pattern"; and the inverse, nothing for any other name.
const char* name_of(Protocol protocol);
[[nodiscard]] std::optional<Protocol> protocol_named(std::string_view name);

// The kernel's name in the module. Each kernel takes a Program and a Call by value, kList a Program
// and a ListCall. It needs lane_count * shares blocks of a multiple of kWarp threads, at most
// kThreadsMax. All blocks must run at the same time: blocks of different ranks wait for each other.
std::string kernel_name(Protocol protocol, KernelKind kind);
// The kernel that takes a Copy by value, with any number of blocks and threads.
inline constexpr const char* kCopyName = "pycoll_copy";
// The kernel that takes Codings by value, with any number of blocks of whole warps, of at most
// kCodingThreads threads.
inline constexpr const char* kCodeName = "pycoll_code";
// The kernel that takes SparseCodings by value, with blocks as those of kCodeName.
inline constexpr const char* kSparseName = "pycoll_sparse";

// The module for cuModuleLoadData, a fat binary; empty where this build has none.
std::span<const std::byte> module_image();
// For users: the architectures of the module, or why there is none.
std::string module_summary();

}  // namespace pycoll::device
