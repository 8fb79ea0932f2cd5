// Device code: encodes, decodes and folds codes (coding.h), by the arithmetic of the host's kernels
// (kernels/codec_formats.h). A warp works on one block of the codec at a time. No warp waits for
// another.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "device/kernels/codes/coding.h"
#include "device/kernels/formats.h"
#include "device/kernels/local.h"
#include "device/kernels/memory.h"
#include "kernels/codec_formats.h"

namespace pycoll::device {

// One value, as kernels/codec_formats.h computes it in a thread.
struct ThreadLane {
  using Words = std::uint32_t;
  using Bits = std::int32_t;
  using Float = float;
  PYCOLL_LANES Words words(Float value) { return std::bit_cast<Words>(value); }
  PYCOLL_LANES Words words(Bits value) { return static_cast<Words>(value); }
  PYCOLL_LANES Bits bits(Words value) { return static_cast<Bits>(value); }
  PYCOLL_LANES Float floats(Words value) { return std::bit_cast<Float>(value); }
  PYCOLL_LANES Words below(Bits a, Bits b) { return a < b ? ~0u : 0u; }
  PYCOLL_LANES Bits truncated(Float value) { return static_cast<Bits>(value); }
  PYCOLL_LANES Float numbers(Bits value) { return static_cast<Float>(value); }
};

using Int8Codes = kernels::IntegerCodes<ThreadLane, 127>;
using Int4Codes = kernels::IntegerCodes<ThreadLane, 7>;
using Fp8Codes = kernels::Float8Codes<ThreadLane>;
using Bf16Codes = kernels::BFloat16Codes<ThreadLane>;
using Signs = kernels::SignValues<ThreadLane>;

// A word or a byte at any address.
PYCOLL_DEVICE std::uint32_t load_word(const void* from) {
  const auto* word = static_cast<const std::uint32_t*>(from);
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(*word) == 0) return load(word);
  return static_cast<std::uint32_t>(
      load_bytes(static_cast<const std::byte*>(from), sizeof(*word)).low);
}
PYCOLL_DEVICE void store_word(void* to, std::uint32_t value) {
  auto* word = static_cast<std::uint32_t*>(to);
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(value) == 0) return store(word, value);
  store_bytes(static_cast<std::byte*>(to), {value, 0}, sizeof(value));
}
PYCOLL_DEVICE std::uint32_t load_byte(const std::byte* from) {
  return load(reinterpret_cast<const std::uint8_t*>(from));
}
PYCOLL_DEVICE void store_byte(std::byte* to, std::uint32_t value) {
  store(reinterpret_cast<std::uint8_t*>(to), static_cast<std::uint8_t>(value));
}
PYCOLL_DEVICE std::uint32_t load_half(const std::byte* from) {
  return load_byte(from) | load_byte(from + 1) << 8;
}
PYCOLL_DEVICE void store_half(std::byte* to, std::uint32_t value) {
  store_byte(to, value);
  store_byte(to + 1, value >> 8);
}

// Element `index` of an array of float32, float16 or bfloat16.
PYCOLL_DEVICE float load_value(const std::byte* array, DType type, std::uint64_t index) {
  if (type == DType::kFloat32) {
    return std::bit_cast<float>(load_word(array + index * sizeof(float)));
  }
  const auto half = static_cast<std::uint16_t>(load_half(array + index * sizeof(std::uint16_t)));
  return type == DType::kFloat16 ? Float16::decode(half) : BFloat16::decode(half);
}
PYCOLL_DEVICE void store_value(std::byte* array, DType type, std::uint64_t index, float value) {
  if (type == DType::kFloat32) {
    const float canonical = Real<float>::encode(value);
    return store_word(array + index * sizeof(float), std::bit_cast<std::uint32_t>(canonical));
  }
  const std::uint32_t half =
      type == DType::kFloat16 ? Float16::encode(value) : BFloat16::encode(value);
  store_half(array + index * sizeof(std::uint16_t), half);
}

// The block of a warp. All threads of the warp call each method together.
class CodeBlock {
 public:
  // `number`: of the warp among warps_of(coding). Without values if the part is shorter than the
  // longest one, or is not encoded.
  PYCOLL_DEVICE CodeBlock(const Coding& coding, std::uint64_t number)
      : coding_(coding), kind_(coding.codec.kind), lane_(thread() % kWarp) {
    const std::uint64_t each = blocks_of_part(coding);
    const auto part = static_cast<std::uint32_t>(number / each);
    const std::uint64_t in_part = number % each * coding.codec.block;
    const std::uint64_t share = coding.count / coding.parts;
    const auto longer = static_cast<std::uint32_t>(coding.count % coding.parts);
    const std::uint64_t length = share + (part < longer ? 1 : 0);
    const bool is_skipped = coding.step == Coding::Step::kEncode && part == coding.own;
    if (in_part < length && !is_skipped) {
      const std::uint64_t left = length - in_part;
      count_ = left < coding.codec.block ? static_cast<std::uint32_t>(left) : coding.codec.block;
    }
    place_ = share * part + (part < longer ? part : longer) + in_part;
    const std::uint64_t bytes = kernels::block_bytes(kind_, coding.codec.block);
    codes_ = coding.codes + coding.stride * part + number % each * bytes;
    first_ = kernels::first_of_chunk(coding.chunk + part) + in_part;
  }

  PYCOLL_DEVICE void run() const {
    if (count_ == 0) return;
    if (coding_.step == Coding::Step::kCorrect) return correct();
    if (coding_.step != Coding::Step::kEncode) return decode();
    switch (kind_) {
      case kernels::CodecKind::kBFloat16:
        return encode_halves();
      case kernels::CodecKind::kInt8:
        return encode_scaled<Int8Codes>();
      case kernels::CodecKind::kInt4:
        return encode_scaled<Int4Codes>();
      case kernels::CodecKind::kFloat8E4M3:
        return encode_scaled<Fp8Codes>();
      case kernels::CodecKind::kSign:
        return encode_signs();
    }
  }

 private:
  using Coded = kernels::Coded<ThreadLane>;

  PYCOLL_DEVICE float given(std::uint32_t index) const {
    return load_value(coding_.values, coding_.values_type, place_ + index);
  }

  PYCOLL_DEVICE std::byte* rests() const { return reinterpret_cast<std::byte*>(coding_.rests); }

  // The value to encode; 0 behind the end.
  PYCOLL_DEVICE float value(std::uint32_t index) const {
    if (index >= count_) return 0;
    const float mine = given(index);
    return coding_.rests == nullptr ? mine
                                    : mine + load_value(rests(), DType::kFloat32, place_ + index);
  }

  PYCOLL_DEVICE void leave(std::uint32_t index, float rest) const {
    if (coding_.rests != nullptr && index < count_) {
      store_value(rests(), DType::kFloat32, place_ + index, rest);
    }
  }

  // The bits of the largest magnitude; above those of infinity if there is a NaN.
  PYCOLL_DEVICE std::uint32_t largest() const {
    std::uint32_t most = 0;
    for (std::uint32_t i = lane_; i < count_; i += kWarp) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(value(i)) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    PYCOLL_UNROLL
    for (std::uint32_t step = kWarp / 2; step != 0; step /= 2) {
      const std::uint32_t other = warp_take(most, lane_ ^ step);
      most = other > most ? other : most;
    }
    return most;
  }

  // A thread writes the rests of values that another thread has read for the scale. The read has
  // ended: the scale, which the written value depends on, is made of it.
  template <typename Format>
  PYCOLL_DEVICE void encode_scaled() const {
    const std::uint32_t most = largest();
    const bool is_spoilt = most >= kernels::kInfinityBits;
    kernels::BlockScale by{std::bit_cast<float>(kernels::kNanBits), 0};
    if (!is_spoilt) by = kernels::ScaledValues<ThreadLane, Format>::factors(most);
    if (lane_ == 0) store_word(codes_, std::bit_cast<std::uint32_t>(by.scale));
    std::byte* codes = codes_ + sizeof(by.scale);
    const std::uint32_t half = coding_.codec.block / 2;
    const bool nibbles = kind_ == kernels::CodecKind::kInt4;
    const std::uint32_t end = nibbles && count_ > half ? half : count_;
    PYCOLL_NO_UNROLL
    for (std::uint32_t i = lane_; i < end; i += kWarp) {
      std::uint32_t code = one_scaled<Format>(i, by, is_spoilt);
      if (nibbles) code = (code & 15) | one_scaled<Format>(i + half, by, is_spoilt) << 4;
      store_byte(codes + i, code);
    }
  }

  template <typename Format>
  PYCOLL_DEVICE std::uint32_t one_scaled(std::uint32_t index, kernels::BlockScale by,
                                         bool is_spoilt) const {
    if (is_spoilt) {
      leave(index, by.scale);
      return 0;
    }
    using Values = kernels::ScaledValues<ThreadLane, Format>;
    using Chances = kernels::Chances<ThreadLane>;
    const float x = value(index);
    Coded made;
    if (coding_.codec.stochastic) {
      const std::uint32_t seed = Chances::block_seed(coding_.codec.seed, first_);
      made = Values::stochastic(x, by, Chances::of(seed, index));
    } else {
      made = Values::nearest(x, by);
    }
    leave(index, x - made.value * by.scale);
    return made.code;
  }

  PYCOLL_DEVICE void encode_halves() const {
    for (std::uint32_t i = lane_; i < count_; i += kWarp) {
      const float x = value(i);
      const std::uint32_t code = Bf16Codes::nearest(x);
      store_half(codes_ + 2 * i, code);
      leave(i, x - Bf16Codes::value(code));
    }
  }

  // Sum k of the magnitudes is that of thread k, and of thread k + 16, too.
  PYCOLL_DEVICE float sum() const {
    constexpr auto kSums = static_cast<std::uint32_t>(Signs::kSums);
    float sum = 0;
    for (std::uint32_t i = lane_ % kSums; i < count_; i += kSums) {
      sum += std::bit_cast<float>(std::bit_cast<std::uint32_t>(value(i)) & 0x7fffffffu);
    }
    PYCOLL_UNROLL
    for (std::uint32_t step = kSums / 2; step != 0; step /= 2) {
      sum += std::bit_cast<float>(warp_take(std::bit_cast<std::uint32_t>(sum), lane_ ^ step));
    }
    return sum;
  }

  PYCOLL_DEVICE void encode_signs() const {
    const auto scale = std::bit_cast<std::uint32_t>(Signs::scale(sum(), count_));
    if (lane_ == 0) store_word(codes_, scale);
    std::byte* codes = codes_ + sizeof(scale);
    PYCOLL_NO_UNROLL
    for (std::uint32_t begin = 0; begin < count_; begin += kWarp) {
      const float x = value(begin + lane_);
      const std::uint32_t signs = warp_bits(sign_bit(x));
      const std::uint32_t left = (count_ - begin + 7) / 8;
      if (lane_ < left && lane_ < kWarp / 8) {
        store_byte(codes + begin / 8 + lane_, signs >> 8 * lane_);
      }
      leave(begin + lane_, x - Signs::value(std::bit_cast<std::uint32_t>(x), scale));
    }
  }

  PYCOLL_DEVICE void correct() const {
    for (std::uint32_t i = lane_; i < count_; i += kWarp) {
      const float before = load_value(coding_.result, DType::kFloat32, place_ + i);
      store_value(coding_.result, DType::kFloat32, place_ + i, before * coding_.factor + given(i));
    }
  }

  PYCOLL_DEVICE void decode() const {
    const bool folds = coding_.step == Coding::Step::kFold;
    const std::uint32_t rows = folds ? coding_.rows : 1;
    PYCOLL_NO_UNROLL
    for (std::uint32_t i = lane_; i < count_; i += kWarp) {
      float total = 0;
      PYCOLL_NO_UNROLL
      for (std::uint32_t row = 0; row < rows; ++row) {
        const bool is_own = folds && row == coding_.own;
        const float one = is_own ? given(i) : decoded(codes_ + coding_.stride * row, i);
        total = row == 0 ? one : total + one;
      }
      if (coding_.divisor != 0) total = total / static_cast<float>(coding_.divisor);
      store_value(coding_.result, coding_.result_type, place_ + i, total);
    }
  }

  // Value `index` of the block whose codes begin there.
  PYCOLL_DEVICE float decoded(const std::byte* block, std::uint32_t index) const {
    if (kind_ == kernels::CodecKind::kBFloat16) {
      return Bf16Codes::value(load_half(block + 2 * index));
    }
    const std::uint32_t scale = load_word(block);
    const std::byte* codes = block + sizeof(scale);
    const float by = std::bit_cast<float>(scale);
    switch (kind_) {
      case kernels::CodecKind::kInt4: {
        const std::uint32_t half = coding_.codec.block / 2;
        const bool is_high = index >= half;
        const std::uint32_t both = load_byte(codes + (is_high ? index - half : index));
        const auto code = static_cast<std::int32_t>(is_high ? both << 24 : both << 28) >> 28;
        return Int4Codes::value(code) * by;
      }
      case kernels::CodecKind::kFloat8E4M3:
        return Fp8Codes::value(static_cast<std::int32_t>(load_byte(codes + index))) * by;
      case kernels::CodecKind::kSign:
        return Signs::value(load_byte(codes + index / 8) << (31 - index % 8), scale);
      default:
        return Int8Codes::value(static_cast<std::int8_t>(load_byte(codes + index))) * by;
    }
  }

  const Coding& coding_;
  const kernels::CodecKind kind_;
  const std::uint32_t lane_;
  std::uint32_t count_ = 0;  // values of the block
  std::uint64_t place_ = 0;  // of its first value in the array
  std::uint64_t first_ = 0;  // index of that value, for rounding by chance
  std::byte* codes_ = nullptr;
};

// All blocks of the launch share the codec's blocks.
PYCOLL_DEVICE void run_coding(const Coding& coding) {
  const std::uint64_t warps = warps_of(coding);
  const std::uint64_t mine = threads() / kWarp;
  for (std::uint64_t warp = block() * mine + thread() / kWarp; warp < warps;
       warp += coding.blocks * mine) {
    CodeBlock(coding, warp).run();
  }
}

}  // namespace pycoll::device
