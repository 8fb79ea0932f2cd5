// Codecs hold float32 in fewer bytes. All instruction sets give the same bits.
//
// | codec | bytes of n values, b to a block | value of a code |
// |---|---|---|
// | bf16 | 2 n | the bfloat16 |
// | int8, fp8 (float8_e4m3) | n + 4 for each block | code * scale |
// | int4 | n/2 + 4 for each block | code * scale |
// | sign | n/8 + 4 for each block | + or - scale |
//
// A block is its scale, a float32, and then its codes. So whole blocks can be cut from an encoded
// array. The last block may be short. The two halves of a byte of int4 are the values j (low) and
// j + b/2 (high) of the block; a short block of n values has min(n, b/2) bytes. Bit i of byte j of
// sign is set if value 8 j + i of the block has its sign bit set.
//
// int8, int4, fp8: the scale is m / largest, rounded, where m is the largest magnitude in the block
// and `largest` is 127, 7 or 448. A code is x * (largest / m), rounded to the nearest code with
// ties to even. Where the value of the code has more than twice the magnitude of x, the code is 0.
// For that reason x minus the value of its code is a float32, so no bit is lost in `rests`. A block
// with m < largest * 2^-126 has the scale 0, and its values go to `rests` whole.
//
// sign: the scale is the mean magnitude of the block. The sum has 16 partial sums: sum k adds the
// magnitudes of values k, k + 16, ... in order, then k and k + 8 are added, then k and k + 4, k +
// 2, k + 1. The subtraction in `rests` rounds.
//
// A block with an infinity or a NaN has the scale NaN, so that all its values decode to NaN. The
// same holds if the sum of sign overflows. bf16 keeps infinities, and NaN becomes 0x7fc0. `rests`
// gets 0 where a code does not decode to a finite number: NaN was sent and is seen, and later calls
// are free of it.
//
// Stochastic rounding (int8 and int4 only) takes the code below or above with chances that make
// the mean right, in steps of 2^-16 of a code. It is a function of seed and index only. `rests` may
// then lose bits below the last place of the code's value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace pycoll::kernels {

enum class CodecKind : std::uint8_t { kBFloat16, kInt8, kInt4, kFloat8E4M3, kSign };
inline constexpr int kCodecCount = 5;

// A block is a power of two in these bounds.
inline constexpr std::size_t kCodecBlockMin = 32;
inline constexpr std::size_t kCodecBlockMax = 4096;

struct Codec {
  CodecKind kind = CodecKind::kBFloat16;
  bool stochastic = false;
  std::uint32_t block = 256;  // values to a scale; bf16 ignores it
  std::uint64_t seed = 0;     // of stochastic rounding
};

// Encodes `count` values. `rests`, if not nullptr, gets each value less what its code decodes to,
// or 0 if that is not finite; it may equal `values`. `first` is the index of the first value, a
// multiple of the block: stochastic rounding depends on it. No alignment is required.
using EncodeFunction = void (*)(void* codes, float* rests, const float* values, std::size_t count,
                                std::uint64_t first, const Codec& codec);
// Decodes `count` values, or adds them to `values`. Every bit pattern is a valid code.
using DecodeFunction = void (*)(float* values, const void* codes, std::size_t count,
                                const Codec& codec);

struct CodecKernels {
  EncodeFunction encode = nullptr;
  DecodeFunction decode = nullptr;
  DecodeFunction decode_add = nullptr;
};

// Bytes of the codes of one block that has `count` of `block` values, without its scale.
constexpr std::size_t code_bytes(CodecKind kind, std::size_t count, std::size_t block) {
  switch (kind) {
    case CodecKind::kBFloat16:
      return 2 * count;
    case CodecKind::kInt4:
      return count < block / 2 ? count : block / 2;
    case CodecKind::kSign:
      return (count + 7) / 8;
    default:
      return count;
  }
}

// Bytes of a whole block.
constexpr std::size_t block_bytes(CodecKind kind, std::size_t block) {
  return (kind == CodecKind::kBFloat16 ? 0 : sizeof(float)) + code_bytes(kind, block, block);
}

// The seed of one rank: ranks that round by chance draw different numbers for equal places.
constexpr std::uint64_t seed_of_rank(std::uint64_t seed, std::uint32_t rank) {
  constexpr std::uint64_t kOdd = 0xd6e8feb86659fd93u;
  return seed ^ kOdd * rank;
}

// The index of a chunk's first value, for such draws.
constexpr std::uint64_t first_of_chunk(std::uint32_t chunk) { return std::uint64_t{chunk} << 40; }

// The bytes of `count` encoded values.
std::size_t encoded_bytes(const Codec& codec, std::size_t count);

// Whether the block has a valid size and the rounding fits the codec.
bool valid(const Codec& codec);

// Kind, rounding and block in one byte that is not zero; transport::Descriptor has it.
std::uint8_t code_of(const Codec& codec);

}  // namespace pycoll::kernels
