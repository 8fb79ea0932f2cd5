// The description of an operation, which the ranks compare before they exchange data.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/types.h"

namespace pycoll::transport {

// The properties of an operation on which all ranks must agree before they exchange a byte of it.
// Fixed layout, because it is hashed, sent and compared: all padding is explicit and zero.
struct Descriptor {
  std::uint64_t count = 0;     // elements, or 0 where ranks may differ (all_gather, gather, ...)
  std::uint64_t plan_key = 0;  // hash of algorithm, tile size, user operation, shape
  std::uint32_t root = 0;
  Collective collective = Collective::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  // 0 without a codec. Else 1 + kernels::CodecKind; + 8 if it rounds by chance; + 16 * log2(values
  // of a block / 32). The seed is in plan_key.
  std::uint8_t codec = 0;

  bool operator==(const Descriptor&) const = default;
};
static_assert(sizeof(Descriptor) == 24 && std::has_unique_object_representations_v<Descriptor>);

// The contribution of an array's shape to Descriptor::plan_key, combined by exclusive or. Zero for
// one axis, because Descriptor::count already states its length.
constexpr std::uint64_t shape_key(int axes, const std::int64_t* lengths) {
  if (axes == 1) return 0;
  std::uint64_t key = 0x6a09e667f3bcc909u + static_cast<std::uint64_t>(axes);
  for (int axis = 0; axis < axes; ++axis) {
    key = (key ^ static_cast<std::uint64_t>(lengths[axis])) * 0x9e3779b97f4a7c15u;
    key ^= key >> 29;
  }
  return key;
}

// "all_reduce of 1024 float32, op sum"; for error messages.
std::string to_text(const Descriptor& descriptor);

}  // namespace pycoll::transport
