// Device code: encodes, decodes and folds codes (coding.h), by the arithmetic of the host's kernels
// (kernels/codec_formats.h). A warp works on one block of the codec at a time, and a thread on four
// values. No warp waits for another.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "device/kernels/codes/coding.h"
#include "device/kernels/codes/quads.h"
#include "device/kernels/formats.h"
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

// The block of a warp. All threads of the warp call each method together. Each thread has every
// 32nd quad of the block.
class CodeBlock {
 public:
  // `number`: of the block in its part. The block has no values if it lies behind the end of its
  // part, or if the part is not encoded.
  PYCOLL_DEVICE CodeBlock(const Coding& coding, const Cuts& cuts, std::uint32_t part,
                          std::uint64_t number)
      : coding_(coding), kind_(coding.codec.kind), lane_(thread() % kWarp) {
    const std::uint64_t in_part = number * coding.codec.block;
    const std::uint64_t length = cuts.share + (part < cuts.longer ? 1 : 0);
    const bool is_skipped = coding.step == Coding::Step::kEncode && part == coding.own;
    if (in_part < length && !is_skipped) {
      const std::uint64_t left = length - in_part;
      count_ = left < coding.codec.block ? static_cast<std::uint32_t>(left) : coding.codec.block;
    }
    place_ = cuts.share * part + (part < cuts.longer ? part : cuts.longer) + in_part;
    const std::uint64_t bytes = kernels::block_bytes(kind_, coding.codec.block);
    if (coding.codes != nullptr) codes_ = coding.codes + coding.stride * part + number * bytes;
    if (coding.codec.stochastic) {
      const std::uint64_t first = kernels::first_of_chunk(coding.chunk + part) + in_part;
      seed_ = kernels::Chances<ThreadLane>::block_seed(coding.codec.seed, first);
    }
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

  // Values from one quad of a thread to the next.
  static constexpr std::uint32_t kStep = kQuad * kWarp;
  static constexpr std::uint32_t kScaleBytes = kFloatBytes;

  // The number of values of the quad at `index` that are in the block.
  PYCOLL_DEVICE std::uint32_t in_quad(std::uint32_t index) const {
    if (index >= count_) return 0;
    return count_ - index < kQuad ? count_ - index : kQuad;
  }

  PYCOLL_DEVICE Quad given(std::uint32_t index) const {
    return load_quad(coding_.values, coding_.values_type, place_ + index, in_quad(index));
  }

  PYCOLL_DEVICE std::byte* rests() const { return reinterpret_cast<std::byte*>(coding_.rests); }

  // The values to encode, residual included; 0 behind the end.
  PYCOLL_DEVICE Quad values(std::uint32_t index) const {
    Quad made = given(index);
    if (coding_.rests == nullptr) return made;
    const Quad rest = load_quad(rests(), DType::kFloat32, place_ + index, in_quad(index));
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) made.at[i] = made.at[i] + rest.at[i];
    return made;
  }

  PYCOLL_DEVICE void leave(std::uint32_t index, const Quad& rest) const {
    if (coding_.rests == nullptr) return;
    store_quad(rests(), DType::kFloat32, place_ + index, in_quad(index), rest);
  }

  PYCOLL_DEVICE static std::uint32_t magnitude(float value) {
    return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
  }

  // The bits of the largest magnitude; above those of infinity if there is a NaN. Two quads are
  // loaded at a time.
  PYCOLL_DEVICE std::uint32_t largest() const {
    std::uint32_t most = 0;
    PYCOLL_NO_UNROLL
    for (std::uint32_t index = kQuad * lane_; index < count_; index += 2 * kStep) {
      const Quad some[] = {values(index), values(index + kStep)};
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < 2 * kQuad; ++i) {
        const std::uint32_t bits = magnitude(some[i / kQuad].at[i % kQuad]);
        most = bits > most ? bits : most;
      }
    }
    PYCOLL_UNROLL
    for (std::uint32_t step = kWarp / 2; step != 0; step /= 2) {
      const std::uint32_t other = warp_take(most, lane_ ^ step);
      most = other > most ? other : most;
    }
    return most;
  }

  // A thread may overwrite rests that another thread reads in largest(). The write cannot overtake
  // the read: every written rest depends on the scale, and the scale depends on all these reads.
  template <typename Format>
  PYCOLL_DEVICE void encode_scaled() const {
    const std::uint32_t most = largest();
    const bool is_spoilt = most >= kernels::kInfinityBits;
    kernels::BlockScale by{std::bit_cast<float>(kernels::kNanBits), 0};
    if (!is_spoilt) by = kernels::ScaledValues<ThreadLane, Format>::factors(most);
    if (lane_ == 0) store_scale(std::bit_cast<std::uint32_t>(by.scale));
    constexpr std::uint32_t kNibbles = 0x0f0f0f0fu;
    const std::uint32_t half = coding_.codec.block / 2;
    const bool nibbles = kind_ == kernels::CodecKind::kInt4;
    const std::uint32_t end = nibbles && count_ > half ? half : count_;
    PYCOLL_NO_UNROLL
    for (std::uint32_t index = kQuad * lane_; index < end; index += kStep) {
      std::uint32_t codes = scaled<Format>(index, by, is_spoilt);
      if (nibbles) {
        codes = (codes & kNibbles) | (scaled<Format>(index + half, by, is_spoilt) & kNibbles) << 4;
      }
      const std::uint32_t bytes = end - index < kQuad ? end - index : kQuad;
      store_most<4>(codes_ + kScaleBytes + index, {codes, 0}, bytes);
    }
  }

  // The codes of a quad, a byte each.
  template <typename Format>
  PYCOLL_DEVICE std::uint32_t scaled(std::uint32_t index, kernels::BlockScale by,
                                     bool is_spoilt) const {
    using Values = kernels::ScaledValues<ThreadLane, Format>;
    using Chances = kernels::Chances<ThreadLane>;
    if (is_spoilt) {
      leave(index, Quad{});
      return 0;
    }
    const Quad x = values(index);
    const bool by_chance = coding_.codec.stochastic;
    std::uint32_t codes = 0;
    Quad rest;
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) {
      const Coded made = by_chance ? Values::stochastic(x.at[i], by, Chances::of(seed_, index + i))
                                   : Values::nearest(x.at[i], by);
      codes |= (made.code & 0xff) << 8 * i;
      rest.at[i] = kernels::rest_of<ThreadLane>(x.at[i], made.value * by.scale);
    }
    leave(index, rest);
    return codes;
  }

  PYCOLL_DEVICE void store_scale(std::uint32_t scale) const {
    store_most<kScaleBytes>(codes_, {scale, 0}, kScaleBytes);
  }

  PYCOLL_DEVICE void encode_halves() const {
    PYCOLL_NO_UNROLL
    for (std::uint32_t index = kQuad * lane_; index < count_; index += 2 * kStep) {
      const Quad some[] = {values(index), values(index + kStep)};
      halve(index, some[0]);
      halve(index + kStep, some[1]);
    }
  }

  PYCOLL_DEVICE void halve(std::uint32_t index, const Quad& x) const {
    Pack codes{0, 0};
    Quad rest;
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) {
      const std::uint32_t code = Bf16Codes::nearest(x.at[i]);
      codes.low |= std::uint64_t{code} << 16 * i;
      rest.at[i] = kernels::rest_of<ThreadLane>(x.at[i], Bf16Codes::value(code));
    }
    store_most<8>(codes_ + kHalfBytes * index, codes, kHalfBytes * in_quad(index));
    leave(index, rest);
  }

  // The sum of the magnitudes, in the order of the host's kernels. Thread k computes partial sums
  // 4 k .. 4 k + 3; threads k + 4, k + 8 and so on compute the same ones. No thread returns before
  // all have read all values.
  PYCOLL_DEVICE float sum() const {
    constexpr auto kSums = static_cast<std::uint32_t>(Signs::kSums);
    constexpr std::uint32_t kThreads = kSums / kQuad;
    Quad sums{};
    PYCOLL_NO_UNROLL
    for (std::uint32_t index = kQuad * (lane_ % kThreads); index < count_; index += 4 * kSums) {
      Quad some[4];
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) some[i] = values(index + i * kSums);
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < 4 * kQuad; ++i) {
        sums.at[i % kQuad] += std::bit_cast<float>(magnitude(some[i / kQuad].at[i % kQuad]));
      }
    }
    PYCOLL_UNROLL
    for (std::uint32_t step = kThreads / 2; step != 0; step /= 2) {
      PYCOLL_UNROLL
      for (float& one : sums.at) {
        one += std::bit_cast<float>(warp_take(std::bit_cast<std::uint32_t>(one), lane_ ^ step));
      }
    }
    return (sums.at[0] + sums.at[2]) + (sums.at[1] + sums.at[3]);
  }

  PYCOLL_DEVICE void encode_signs() const {
    constexpr std::uint32_t kThreads = 32 / kQuad;  // whose signs are a word
    const auto scale = std::bit_cast<std::uint32_t>(Signs::scale(sum(), count_));
    if (lane_ == 0) store_scale(scale);
    PYCOLL_NO_UNROLL
    for (std::uint32_t begin = 0; begin < count_; begin += kStep) {
      const std::uint32_t index = begin + kQuad * lane_;
      const Quad x = values(index);
      std::uint32_t signs = 0;
      Quad rest;
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < kQuad; ++i) {
        signs |= (sign_bit(x.at[i]) ? 1u : 0u) << i;
        const float sent = Signs::value(std::bit_cast<std::uint32_t>(x.at[i]), scale);
        rest.at[i] = kernels::rest_of<ThreadLane>(x.at[i], sent);
      }
      signs <<= kQuad * (lane_ % kThreads);
      PYCOLL_UNROLL
      for (std::uint32_t step = kThreads / 2; step != 0; step /= 2) {
        signs |= warp_take(signs, lane_ ^ step);
      }
      if (lane_ % kThreads == 0 && index < count_) {
        const std::uint32_t bytes = (count_ - index + 7) / 8;
        store_most<4>(codes_ + kScaleBytes + index / 8, {signs, 0}, bytes < 4 ? bytes : 4);
      }
      leave(index, rest);
    }
  }

  PYCOLL_DEVICE void correct() const {
    PYCOLL_NO_UNROLL
    for (std::uint32_t index = kQuad * lane_; index < count_; index += kStep) {
      const std::uint32_t count = in_quad(index);
      Quad made = load_quad(coding_.result, DType::kFloat32, place_ + index, count);
      const Quad x = given(index);
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < kQuad; ++i) {
        made.at[i] = made.at[i] * coding_.factor + x.at[i];
      }
      store_quad(coding_.result, DType::kFloat32, place_ + index, count, made);
    }
  }

  // Stores the sum of the rows' values, divided by `divisor` unless that is 0.
  PYCOLL_DEVICE void decode() const {
    const std::uint32_t rows = coding_.step == Coding::Step::kDecode ? 1 : coding_.rows;
    PYCOLL_NO_UNROLL
    for (std::uint32_t index = kQuad * lane_; index < count_; index += kStep) {
      Quad total{};
      PYCOLL_NO_UNROLL
      for (std::uint32_t row = 0; row < rows; ++row) {
        const Quad one = row_of(row, index);
        PYCOLL_UNROLL
        for (std::uint32_t i = 0; i < kQuad; ++i) {
          total.at[i] = row == 0 ? one.at[i] : total.at[i] + one.at[i];
        }
      }
      if (coding_.divisor != 0) {
        PYCOLL_UNROLL
        for (float& one : total.at) one = one / static_cast<float>(coding_.divisor);
      }
      store_quad(coding_.result, coding_.result_type, place_ + index, in_quad(index), total);
    }
  }

  // The quad at `index` of a row.
  PYCOLL_DEVICE Quad row_of(std::uint32_t row, std::uint32_t index) const {
    const std::uint64_t begin = coding_.stride * row;
    if (coding_.step == Coding::Step::kTotal) {
      return load_quad(coding_.values + begin, coding_.values_type, place_ + index, in_quad(index));
    }
    const bool is_own = coding_.step == Coding::Step::kFold && row == coding_.own;
    return is_own ? given(index) : decode(codes_ + begin, index);
  }

  // The quad at `index` of the block whose codes begin there.
  PYCOLL_DEVICE Quad decode(const std::byte* block, std::uint32_t index) const {
    const std::uint32_t count = in_quad(index);
    Quad made;
    if (kind_ == kernels::CodecKind::kBFloat16) {
      const std::uint64_t codes = load_most<8>(block + kHalfBytes * index, kHalfBytes * count).low;
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < kQuad; ++i) {
        made.at[i] = Bf16Codes::value(static_cast<std::uint16_t>(codes >> 16 * i));
      }
      return made;
    }
    const auto scale = static_cast<std::uint32_t>(load_most<kScaleBytes>(block, kScaleBytes).low);
    const std::byte* from = block + kScaleBytes;
    if (kind_ == kernels::CodecKind::kSign) {
      const std::uint32_t signs =
          load(reinterpret_cast<const std::uint8_t*>(from + index / 8)) >> index % 8;
      PYCOLL_UNROLL
      for (std::uint32_t i = 0; i < kQuad; ++i) {
        made.at[i] = Signs::value(signs << (31 - i), scale);
      }
      return made;
    }
    const std::uint32_t half = coding_.codec.block / 2;
    const bool nibbles = kind_ == kernels::CodecKind::kInt4;
    const bool is_high = nibbles && index >= half;
    const auto codes = static_cast<std::uint32_t>(
        load_most<4>(from + (is_high ? index - half : index), count).low);
    PYCOLL_UNROLL
    for (std::uint32_t i = 0; i < kQuad; ++i) {
      made.at[i] = value_of(codes >> 8 * i, is_high) * std::bit_cast<float>(scale);
    }
    return made;
  }

  // The number that the low byte of `code` stands for. `is_high`: int4 reads its upper four bits.
  PYCOLL_DEVICE float value_of(std::uint32_t code, bool is_high) const {
    switch (kind_) {
      case kernels::CodecKind::kInt4:
        return Int4Codes::value(static_cast<std::int32_t>(code << (is_high ? 24 : 28)) >> 28);
      case kernels::CodecKind::kFloat8E4M3:
        return Fp8Codes::value(static_cast<std::int32_t>(code & 0xff));
      default:
        return Int8Codes::value(static_cast<std::int8_t>(code & 0xff));
    }
  }

  const Coding& coding_;
  const kernels::CodecKind kind_;
  const std::uint32_t lane_;
  std::uint32_t count_ = 0;  // values of the block
  std::uint64_t place_ = 0;  // of its first value in the array
  std::uint32_t seed_ = 0;   // for rounding by chance
  std::byte* codes_ = nullptr;
};

// All warps of the launch share the codec's blocks of all steps: part by part, step by step.
PYCOLL_DEVICE void run_codings(const Codings& codings) {
  const std::uint32_t mine = threads() / kWarp;
  const std::uint32_t step = codings.blocks * mine;
  std::uint64_t number = block() * mine + thread() / kWarp;  // of the block in its part
  PYCOLL_NO_UNROLL
  for (std::uint32_t at = 0; at < codings.count; ++at) {
    const Coding& coding = codings.each[at];
    const Cuts cuts = cuts_of(coding);
    PYCOLL_NO_UNROLL
    for (std::uint32_t part = 0; part < coding.parts; ++part, number -= cuts.blocks) {
      PYCOLL_NO_UNROLL
      for (; number < cuts.blocks; number += step) CodeBlock(coding, cuts, part, number).run();
    }
  }
}

}  // namespace pycoll::device
