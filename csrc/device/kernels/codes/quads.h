// Device code: four neighbouring values of an array of floats, which a thread loads at a time, and
// words of codes. Arrays may have any alignment.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "device/kernels/formats.h"
#include "device/kernels/local.h"
#include "device/kernels/memory.h"

namespace pycoll::device {

// Bytes at any address, of which most lie `kFull` together at a multiple of kFull. One copy of the
// code for all others serves all callers.
PYCOLL_DEVICE_CALL Pack load_ragged(const std::byte* from, std::uint32_t bytes) {
  return load_bytes(from, bytes);
}
PYCOLL_DEVICE_CALL void store_ragged(std::byte* to, Pack pack, std::uint32_t bytes) {
  store_bytes(to, pack, bytes);
}
template <std::uint32_t kFull>
PYCOLL_DEVICE Pack load_most(const std::byte* from, std::uint32_t bytes) {
  if (bytes != kFull || reinterpret_cast<std::uintptr_t>(from) % kFull != 0) {
    return load_ragged(from, bytes);
  }
  if constexpr (kFull == 16) return load16(from);
  if constexpr (kFull == 8) return {load(reinterpret_cast<const std::uint64_t*>(from)), 0};
  return {load(reinterpret_cast<const std::uint32_t*>(from)), 0};
}
template <std::uint32_t kFull>
PYCOLL_DEVICE void store_most(std::byte* to, Pack pack, std::uint32_t bytes) {
  if (bytes != kFull || reinterpret_cast<std::uintptr_t>(to) % kFull != 0) {
    return store_ragged(to, pack, bytes);
  }
  if constexpr (kFull == 16) return store16(to, pack);
  if constexpr (kFull == 8) return store(reinterpret_cast<std::uint64_t*>(to), pack.low);
  store(reinterpret_cast<std::uint32_t*>(to), static_cast<std::uint32_t>(pack.low));
}

// Neighbouring values of an array of float32, float16 or bfloat16: what a thread loads at a time.
inline constexpr std::uint32_t kQuad = 4;
struct Quad {
  float at[kQuad];
};
inline constexpr std::uint32_t kFloatBytes = 4;
inline constexpr std::uint32_t kHalfBytes = 2;

// Elements from `index` on; 0 from the `count`-th on.
PYCOLL_DEVICE Quad load_quad(const std::byte* array, DType type, std::uint64_t index,
                             std::uint32_t count) {
  Quad made;
  if (type == DType::kFloat32) {
    const Pack pack = load_most<16>(array + kFloatBytes * index, kFloatBytes * count);
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) {
      const std::uint64_t both = i < 2 ? pack.low : pack.high;
      made.at[i] = std::bit_cast<float>(static_cast<std::uint32_t>(both >> 32 * (i % 2)));
    }
    return made;
  }
  const Pack pack = load_most<8>(array + kHalfBytes * index, kHalfBytes * count);
  PYCOLL_UNROLL
  for (std::uint32_t i = 0; i < kQuad; ++i) {
    const auto half = static_cast<std::uint16_t>(pack.low >> 16 * i);
    made.at[i] = type == DType::kFloat16 ? Float16::decode(half) : BFloat16::decode(half);
  }
  return made;
}
PYCOLL_DEVICE void store_quad(std::byte* array, DType type, std::uint64_t index,
                              std::uint32_t count, Quad quad) {
  Pack pack{0, 0};
  if (type == DType::kFloat32) {
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) {
      const float canonical = Real<float>::encode(quad.at[i]);
      const std::uint64_t word = std::bit_cast<std::uint32_t>(canonical);
      (i < 2 ? pack.low : pack.high) |= word << 32 * (i % 2);
    }
    return store_most<16>(array + kFloatBytes * index, pack, kFloatBytes * count);
  }
  PYCOLL_UNROLL
  for (std::uint32_t i = 0; i < kQuad; ++i) {
    const std::uint64_t half =
        type == DType::kFloat16 ? Float16::encode(quad.at[i]) : BFloat16::encode(quad.at[i]);
    pack.low |= half << 16 * i;
  }
  store_most<8>(array + kHalfBytes * index, pack, kHalfBytes * count);
}

}  // namespace pycoll::device
