#include "kernels/codecs.h"

#include <bit>

namespace pycoll::kernels {
std::size_t encoded_bytes(const Codec& codec, std::size_t count) {
  if (codec.kind == CodecKind::kBFloat16) return 2 * count;
  const std::size_t block = codec.block;
  const std::size_t short_block = count % block;
  std::size_t bytes = count / block * block_bytes(codec.kind, block);
  if (short_block != 0) bytes += sizeof(float) + code_bytes(codec.kind, short_block, block);
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
