// The codecs of codecs.h, written once for all vector units.
#pragma once

#include "kernels/codec_formats.h"
#include "kernels/codecs.h"
#include "kernels/cpu/lanes.h"

namespace pycoll::kernels {

template <typename M>
struct CodecLanes {
  using Words = typename M::Words;
  using Bits = typename M::Bits;
  using Float = typename M::Float;
  static constexpr std::size_t kLanes = sizeof(Float) / sizeof(float);
  template <typename T>
  using Narrow = Vector<T, kLanes * sizeof(T)>;

  PYCOLL_LANES Float load(const float* from) {
    return M::template load<Float>(reinterpret_cast<const char*>(from));
  }
  PYCOLL_LANES void store(float* to, Float value) { M::store(reinterpret_cast<char*>(to), value); }
  PYCOLL_LANES float float_of(std::uint32_t bits) {
    float value = 0;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }
  template <bool adds>
  PYCOLL_LANES void give(float* to, Float value) {
    store(to, adds ? load(to) + value : value);
  }
  PYCOLL_LANES Words magnitude(Float value) { return (Words)value & 0x7fffffffu; }

  // The bits of the largest magnitude; above those of infinity if there is a NaN.
  PYCOLL_LANES std::uint32_t largest_bits(const float* values, std::size_t count) {
    Bits most = {};
    for (std::size_t i = 0; i < count; i += kLanes) {
      const Bits bits = (Bits)magnitude(load(values + i));
      most = bits > most ? bits : most;
    }
    return static_cast<std::uint32_t>(M::largest(most));
  }

  PYCOLL_LANES Words lane_numbers() {
    Words numbers = {};
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      numbers[lane] = static_cast<std::uint32_t>(lane);
    return numbers;
  }
};

// Where the codes of a block's values stand in its bytes: one byte for each value.
template <typename M>
struct ByteCodes : CodecLanes<M> {
  using Base = CodecLanes<M>;
  using typename Base::Bits;
  using typename Base::Words;

  static constexpr std::size_t bytes_of(std::size_t block) { return block; }

  // `code_at` gives the codes of the values from an index on.
  template <typename CodeAt>
  PYCOLL_LANES void put(char* to, std::size_t block, CodeAt code_at) {
    for (std::size_t i = 0; i < block; i += Base::kLanes) {
      M::store_bytes(to + i, code_at(i));
    }
  }

  // `take` gets an index, and the codes of the values from there on.
  template <typename Take>
  PYCOLL_LANES void get(const char* from, std::size_t block, Take take) {
    for (std::size_t i = 0; i < block; i += Base::kLanes) {
      take(i, M::load_bytes(from + i));
    }
  }
};

// One byte for the values j and j + block/2.
template <typename M>
struct NibbleCodes : CodecLanes<M> {
  using Base = CodecLanes<M>;
  using typename Base::Bits;
  using typename Base::Words;

  static constexpr std::size_t bytes_of(std::size_t block) { return block / 2; }

  template <typename CodeAt>
  PYCOLL_LANES void put(char* to, std::size_t block, CodeAt code_at) {
    for (std::size_t i = 0; i < block / 2; i += Base::kLanes) {
      const Words low = code_at(i);
      const Words both = (low & 15) | (code_at(i + block / 2) << 4);
      M::store_bytes(to + i, both);
    }
  }

  template <typename Take>
  PYCOLL_LANES void get(const char* from, std::size_t block, Take take) {
    for (std::size_t i = 0; i < block / 2; i += Base::kLanes) {
      const Bits both = M::load_bytes(from + i);
      take(i, (Bits)((Words)both << 28) >> 28);
      take(i + block / 2, both >> 4);
    }
  }
};

// A whole block of integers or 8-bit floats.
template <typename M, typename Format, typename Layout>
struct ScaledBlock : CodecLanes<M> {
  using Base = CodecLanes<M>;
  using typename Base::Bits;
  using typename Base::Float;
  using typename Base::Words;
  using Values = ScaledValues<M, Format>;

  static constexpr std::size_t bytes_of(std::size_t block) {
    return sizeof(float) + Layout::bytes_of(block);
  }

  static void encode(char* to, float* rests, const float* values, std::size_t /*count*/,
                     std::uint64_t first, const Codec& codec) {
    const std::uint32_t bits = Base::largest_bits(values, codec.block);
    const bool is_spoilt = bits >= kInfinityBits;
    BlockScale by{Base::float_of(kNanBits), 0};
    if (!is_spoilt) by = Values::factors(bits);
    __builtin_memcpy(to, &by.scale, sizeof(by.scale));
    to += sizeof(by.scale);
    if (is_spoilt) return spoil(to, rests, codec.block);
    if (codec.stochastic) {
      const std::uint32_t seed = Chances<M>::block_seed(codec.seed, first);
      const Words numbers = Base::lane_numbers();
      return put(to, rests, values, codec.block, by.scale, [&](std::size_t i, Float x) {
        const Words index = numbers + static_cast<std::uint32_t>(i);
        return Values::stochastic(x, by, Chances<M>::of(seed, index));
      });
    }
    put(to, rests, values, codec.block, by.scale,
        [&](std::size_t, Float x) { return Values::nearest(x, by); });
  }

  template <bool adds>
  static void decode(float* values, const char* from, std::size_t block) {
    float scale = 0;
    __builtin_memcpy(&scale, from, sizeof(scale));
    Layout::get(from + sizeof(scale), block, [&](std::size_t i, Bits code) {
      Base::template give<adds>(values + i, Format::value(code) * scale);
    });
  }

 private:
  template <typename Rounding>
  PYCOLL_LANES void put(char* to, float* rests, const float* values, std::size_t block, float scale,
                        Rounding round) {
    Layout::put(to, block, [&](std::size_t i) {
      const Float x = Base::load(values + i);
      const Coded<M> coded = round(i, x);
      if (rests != nullptr) Base::store(rests + i, rest_of<M>(x, coded.value * scale));
      return coded.code;
    });
  }

  // A block that decodes to NaN leaves nothing.
  static void spoil(char* codes, float* rests, std::size_t block) {
    __builtin_memset(codes, 0, Layout::bytes_of(block));
    if (rests != nullptr) __builtin_memset(rests, 0, block * sizeof(float));
  }
};

// One bit for each value.
template <typename M>
struct SignBlock : CodecLanes<M> {
  using Base = CodecLanes<M>;
  using typename Base::Float;
  using typename Base::Words;
  using Values = SignValues<M>;
  static constexpr std::size_t kSums = Values::kSums;
  static constexpr std::size_t kBits = 32;

  static constexpr std::size_t bytes_of(std::size_t block) { return sizeof(float) + block / 8; }

  static void encode(char* to, float* rests, const float* values, std::size_t count,
                     std::uint64_t /*first*/, const Codec& codec) {
    const float scale = Values::scale(sum(values, codec.block), count);
    __builtin_memcpy(to, &scale, sizeof(scale));
    to += sizeof(scale);
    for (std::size_t i = 0; i < codec.block; i += kBits, to += sizeof(std::uint32_t)) {
      std::uint32_t signs = 0;
      for (std::size_t k = 0; k < kBits; k += Base::kLanes) {
        signs |= M::sign_bits(Base::load(values + i + k)) << k;
      }
      __builtin_memcpy(to, &signs, sizeof(signs));
    }
    if (rests == nullptr) return;
    const auto scales = (Words)(Float{} + scale);
    for (std::size_t i = 0; i < codec.block; i += Base::kLanes) {
      const Float x = Base::load(values + i);
      Base::store(rests + i, rest_of<M>(x, Values::value((Words)x, scales)));
    }
  }

  template <bool adds>
  static void decode(float* values, const char* from, std::size_t block) {
    float scale = 0;
    __builtin_memcpy(&scale, from, sizeof(scale));
    from += sizeof(scale);
    const auto scales = (Words)(Float{} + scale);
    const Words places = (Words{} + 1) << Base::lane_numbers();
    for (std::size_t i = 0; i < block; i += kBits, from += sizeof(std::uint32_t)) {
      std::uint32_t signs = 0;
      __builtin_memcpy(&signs, from, sizeof(signs));
      for (std::size_t k = 0; k < kBits; k += Base::kLanes) {
        const auto set = (Words)(((Words{} + (signs >> k)) & places) != 0);
        Base::template give<adds>(values + i + k, Values::value(set, scales));
      }
    }
  }

 private:
  PYCOLL_LANES float sum(const float* values, std::size_t block) {
    constexpr std::size_t kVectors = kSums / Base::kLanes;
    Float sums[kVectors] = {};
    for (std::size_t i = 0; i < block; i += kSums) {
      for (std::size_t v = 0; v < kVectors; ++v) {
        sums[v] += (Float)Base::magnitude(Base::load(values + i + v * Base::kLanes));
      }
    }
    float all[kSums];
    __builtin_memcpy(all, sums, sizeof(all));
    for (std::size_t half = kSums / 2; half > 0; half /= 2) {
      for (std::size_t k = 0; k < half; ++k) all[k] += all[k + half];
    }
    return all[0];
  }
};

// The upper half of each float32, rounded. There is no scale.
template <typename M>
struct BFloat16Block : CodecLanes<M> {
  using Base = CodecLanes<M>;
  using typename Base::Bits;
  using typename Base::Float;
  using typename Base::Words;
  using Halves = typename Base::template Narrow<std::uint16_t>;
  using Codes = BFloat16Codes<M>;

  static constexpr std::size_t bytes_of(std::size_t block) { return 2 * block; }

  static void encode(char* to, float* rests, const float* values, std::size_t /*count*/,
                     std::uint64_t /*first*/, const Codec& codec) {
    for (std::size_t i = 0; i < codec.block; i += Base::kLanes) {
      const Float x = Base::load(values + i);
      const Words code = Codes::nearest(x);
      M::store(to + 2 * i, __builtin_convertvector(code, Halves));
      if (rests != nullptr) Base::store(rests + i, rest_of<M>(x, Codes::value(code)));
    }
  }

  template <bool adds>
  static void decode(float* values, const char* from, std::size_t block) {
    for (std::size_t i = 0; i < block; i += Base::kLanes) {
      const Words code = __builtin_convertvector(M::template load<Halves>(from + 2 * i), Words);
      Base::template give<adds>(values + i, Codes::value(code));
    }
  }
};

// An array of blocks. A short block at the end is computed in a copy that ends with zeros.
template <typename Block>
struct BlockCodec {
  static constexpr std::size_t kBytesMax = sizeof(float) + 2 * kCodecBlockMax;

  static void encode(void* codes, float* rests, const float* values, std::size_t count,
                     std::uint64_t first, const Codec& codec) {
    auto* to = static_cast<char*>(codes);
    const std::size_t block = codec.block;
    std::size_t at = 0;
    for (; at + block <= count; at += block, to += Block::bytes_of(block)) {
      Block::encode(to, rests == nullptr ? nullptr : rests + at, values + at, block, first + at,
                    codec);
    }
    const std::size_t left = count - at;
    if (left == 0) return;
    float copy[kCodecBlockMax];
    char bytes[kBytesMax];
    __builtin_memset(copy, 0, block * sizeof(float));
    __builtin_memcpy(copy, values + at, left * sizeof(float));
    Block::encode(bytes, copy, copy, left, first + at, codec);
    __builtin_memcpy(to, bytes, encoded_bytes(codec, left));
    if (rests != nullptr) __builtin_memcpy(rests + at, copy, left * sizeof(float));
  }

  template <bool adds>
  static void decode(float* values, const void* codes, std::size_t count, const Codec& codec) {
    const auto* from = static_cast<const char*>(codes);
    const std::size_t block = codec.block;
    std::size_t at = 0;
    for (; at + block <= count; at += block, from += Block::bytes_of(block)) {
      Block::template decode<adds>(values + at, from, block);
    }
    const std::size_t left = count - at;
    if (left == 0) return;
    float copy[kCodecBlockMax];
    char bytes[kBytesMax];
    __builtin_memset(bytes, 0, Block::bytes_of(block));
    __builtin_memset(copy, 0, block * sizeof(float));
    __builtin_memcpy(bytes, from, encoded_bytes(codec, left));
    if (adds) __builtin_memcpy(copy, values + at, left * sizeof(float));
    Block::template decode<adds>(copy, bytes, block);
    __builtin_memcpy(values + at, copy, left * sizeof(float));
  }

  static constexpr CodecKernels kKernels{encode, decode<false>, decode<true>};
};

// The codecs of a vector unit, in the form that backend.h needs.
template <typename M>
struct Codecs {
  static CodecKernels of(CodecKind kind) {
    static constexpr CodecKernels kernels[kCodecCount] = {
        BlockCodec<BFloat16Block<M>>::kKernels,
        BlockCodec<ScaledBlock<M, IntegerCodes<M, 127>, ByteCodes<M>>>::kKernels,
        BlockCodec<ScaledBlock<M, IntegerCodes<M, 7>, NibbleCodes<M>>>::kKernels,
        BlockCodec<ScaledBlock<M, Float8Codes<M>, ByteCodes<M>>>::kKernels,
        BlockCodec<SignBlock<M>>::kKernels};
    return kernels[static_cast<int>(kind)];
  }
};

}  // namespace pycoll::kernels
