// Device code: sixteen bytes at any address of this rank's memory. No other file handles unaligned
// beginnings and short ends.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels/memory.h"
#include "device/kernels/pack.h"

namespace pycoll::device {

// Byte `index` of a pack and those above it, as the low bytes of the result.
PYCOLL_DEVICE std::uint64_t bits_from(Pack pack, std::uint32_t index) {
  if (index >= 8) return pack.high >> (8 * (index - 8));
  const std::uint64_t upper = index == 0 ? 0 : pack.high << (64 - 8 * index);
  return pack.low >> (8 * index) | upper;
}

PYCOLL_DEVICE void put_bits(Pack& pack, std::uint32_t index, std::uint64_t bits) {
  if (index >= 8) {
    pack.high |= bits << (8 * (index - 8));
    return;
  }
  pack.low |= bits << (8 * index);
  if (index != 0) pack.high |= bits >> (64 - 8 * index);
}

// The largest access at `address` + index that is aligned and ends by `bytes`: 8, 4, 2 or 1.
PYCOLL_DEVICE std::uint32_t piece_at(std::uintptr_t address, std::uint32_t index,
                                     std::uint32_t bytes) {
  std::uint32_t piece = 8;
  while ((address + index) % piece != 0 || index + piece > bytes) piece /= 2;
  return piece;
}

// The first `bytes` bytes at `from`, zeros above. Requires: bytes <= 16.
PYCOLL_DEVICE Pack load_bytes(const std::byte* from, std::uint32_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  if (bytes == kPackBytes && address % kPackBytes == 0) return load16(from);
  Pack pack{0, 0};
  for (std::uint32_t index = 0; index < bytes;) {
    const std::uint32_t piece = piece_at(address, index, bytes);
    const void* at = from + index;
    std::uint64_t bits = 0;
    if (piece == 8) bits = load(static_cast<const std::uint64_t*>(at));
    if (piece == 4) bits = load(static_cast<const std::uint32_t*>(at));
    if (piece == 2) bits = load(static_cast<const std::uint16_t*>(at));
    if (piece == 1) bits = load(static_cast<const std::uint8_t*>(at));
    put_bits(pack, index, bits);
    index += piece;
  }
  return pack;
}

// Stores exactly the first `bytes` bytes of `pack`. Requires: bytes <= 16.
PYCOLL_DEVICE void store_bytes(std::byte* to, Pack pack, std::uint32_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  if (bytes == kPackBytes && address % kPackBytes == 0) return store16(to, pack);
  for (std::uint32_t index = 0; index < bytes;) {
    const std::uint32_t piece = piece_at(address, index, bytes);
    void* at = to + index;
    const std::uint64_t bits = bits_from(pack, index);
    if (piece == 8) store(static_cast<std::uint64_t*>(at), bits);
    if (piece == 4) store(static_cast<std::uint32_t*>(at), static_cast<std::uint32_t>(bits));
    if (piece == 2) store(static_cast<std::uint16_t*>(at), static_cast<std::uint16_t>(bits));
    if (piece == 1) store(static_cast<std::uint8_t*>(at), static_cast<std::uint8_t>(bits));
    index += piece;
  }
}

}  // namespace pycoll::device
