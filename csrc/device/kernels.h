// Which kernels there are, and the module that holds them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/types.h"
#include "device/program.h"

namespace pycoll::device {

// A kernel per protocol and kind. Sums of the types that training uses are compiled apart.
enum class KernelKind : std::uint8_t {
  kAny = 0,
  kSumFloat32 = 1,
  kSumBFloat16 = 2,
  kSumFloat16 = 3,
  kList = 4,  // any reduction, on several arrays
};
inline constexpr std::uint32_t kKernelKindCount = 5;

// The fastest that gives the right bits. `reduces`: whether rows combine at all; what is only
// copied goes with more bytes in flight through any of the fixed ones.
constexpr KernelKind kind_of(bool reduces, DType dtype, ReduceOp op) {
  if (!reduces) return KernelKind::kSumFloat32;
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg) return KernelKind::kAny;
  if (dtype == DType::kFloat32) return KernelKind::kSumFloat32;
  if (dtype == DType::kBFloat16) return KernelKind::kSumBFloat16;
  if (dtype == DType::kFloat16) return KernelKind::kSumFloat16;
  return KernelKind::kAny;
}

// "ll", "ll128", "simple", "pattern"; and back, nothing for any other name.
const char* name_of(Protocol protocol);
[[nodiscard]] std::optional<Protocol> protocol_named(std::string_view name);

// The kernel's name in the module. Each takes a Program and a Call, kList a ListCall, by value, and
// wants lane_count * shares blocks of a multiple of kWarp, at most kThreadsMax, threads that all
// run at the same time: blocks of different ranks wait for each other.
std::string kernel_name(Protocol protocol, KernelKind kind);
// The kernel that takes a Copy by value, and any number of blocks and threads.
inline constexpr const char* kCopyName = "pycoll_copy";

// The module for cuModuleLoadData, a fat binary; empty where this build has none.
std::span<const std::byte> module_image();
// For users: the architectures of the module, or why there is none.
std::string module_summary();

}  // namespace pycoll::device
