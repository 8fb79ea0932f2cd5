#include "kernels/codecs.h"

#include <algorithm>
#include <bit>

namespace pycoll::kernels {
namespace {

constexpr std::size_t kScaleBytes = sizeof(float);

// Bytes of the codes of one block that has `count` of `block` values.
std::size_t code_bytes(CodecKind kind, std::size_t count, std::size_t block) {
  switch (kind) {
    case CodecKind::kInt4:
      return std::min(count, block / 2);
    case CodecKind::kSign:
      return (count + 7) / 8;
    default:
      return count;
  }
}

}  // namespace

std::size_t encoded_bytes(const Codec& codec, std::size_t count) {
  if (codec.kind == CodecKind::kBFloat16) return 2 * count;
  const std::size_t block = codec.block;
  const std::size_t short_block = count % block;
  std::size_t bytes = count / block * (kScaleBytes + code_bytes(codec.kind, block, block));
  if (short_block != 0) bytes += kScaleBytes + code_bytes(codec.kind, short_block, block);
  return bytes;
}

std::uint8_t code_of(const Codec& codec) {
  const int kind = static_cast<int>(codec.kind) + 1;
  const int blocks = std::countr_zero(codec.block / kCodecBlockMin);
  return static_cast<std::uint8_t>(kind | (codec.stochastic ? 8 : 0) | blocks << 4);
}

bool valid(const Codec& codec) {
  if (static_cast<int>(codec.kind) >= kCodecCount) return false;
  const bool integer = codec.kind == CodecKind::kInt8 || codec.kind == CodecKind::kInt4;
  return std::has_single_bit(codec.block) && codec.block >= kCodecBlockMin &&
         codec.block <= kCodecBlockMax && (integer || !codec.stochastic);
}

}  // namespace pycoll::kernels
