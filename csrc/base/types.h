// Types that plans, kernels, transports and bindings share. The enums have fixed values: plans
// store them, headers carry them, and pycoll/types.py repeats them (a test compares both).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pycoll {

enum class Collective : std::uint8_t {
  kAllReduce = 0,
  kReduce = 1,
  kBroadcast = 2,
  kReduceScatter = 3,
  kAllGather = 4,
  kGather = 5,
  kScatter = 6,
  kAllToAll = 7,
  kScan = 8,
  kExscan = 9,
  kBarrier = 10,
};
inline constexpr int kCollectiveCount = 11;

// kFloat8E4M3 is the "fn" variant (no infinities, one NaN pattern). kFloat8E5M2 follows IEEE rules.
enum class DType : std::uint8_t {
  kBool = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kUInt8 = 5,
  kUInt16 = 6,
  kUInt32 = 7,
  kUInt64 = 8,
  kFloat16 = 9,
  kBFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kComplex64 = 13,
  kComplex128 = 14,
  kFloat8E4M3 = 15,
  kFloat8E5M2 = 16,
};
inline constexpr int kDTypeCount = 17;

// kUser is an operation that the user registered by name. The call brings its kernel.
enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kProd = 1,
  kMin = 2,
  kMax = 3,
  kAvg = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
  kUser = 8,
  kLand = 9,
  kLor = 10,
  kLxor = 11,
  kMaxloc = 12,
  kMinloc = 13,
};
inline constexpr int kReduceOpCount = 14;

// Bytes of one element. Requires: a valid dtype.
std::size_t item_bytes(DType dtype);

// Lower-case names as in the Python API ("float32", "all_reduce", "sum"); "unknown" for an invalid
// value.
std::string_view name_of(DType dtype);
std::string_view name_of(Collective collective);
std::string_view name_of(ReduceOp op);

}  // namespace pycoll
