// All kernels of one vector unit, in the form that table.h needs.
#pragma once

#include <type_traits>

#include "kernels/cpu/byte_sums.h"
#include "kernels/cpu/codec_lanes.h"
#include "kernels/cpu/fold.h"
#include "kernels/cpu/half_formats.h"
#include "kernels/cpu/low_rank_product.h"
#include "kernels/cpu/sparse_scan.h"
#include "kernels/table.h"

namespace pycoll::kernels {

// As item_bytes() of base/types.h, but a constant expression.
constexpr std::size_t kItemBytes[kDTypeCount] = {1, 1, 2, 4, 8, 1,  2, 4, 8,
                                                 2, 2, 4, 8, 8, 16, 1, 1};

// clang-format off
template <DType> struct IntegerOf;
template <> struct IntegerOf<DType::kInt8> { using Type = std::int8_t; };
template <> struct IntegerOf<DType::kInt16> { using Type = std::int16_t; };
template <> struct IntegerOf<DType::kInt32> { using Type = std::int32_t; };
template <> struct IntegerOf<DType::kInt64> { using Type = std::int64_t; };
template <> struct IntegerOf<DType::kUInt8> { using Type = std::uint8_t; };
template <> struct IntegerOf<DType::kUInt16> { using Type = std::uint16_t; };
template <> struct IntegerOf<DType::kUInt32> { using Type = std::uint32_t; };
template <> struct IntegerOf<DType::kUInt64> { using Type = std::uint64_t; };
// clang-format on

template <typename M>
struct Family {
  template <DType dtype>
  using Integer = typename IntegerOf<dtype>::Type;

  template <DType dtype, ReduceOp op>
  static void combine(void* target, const void* const* sources, int source_count, std::size_t count,
                      void* /*context*/) {
    const std::size_t bytes = count * kItemBytes[static_cast<int>(dtype)];
    auto* to = static_cast<char*>(target);
    if (source_count == 2) return LoopOf<dtype, op, 2>::run(to, sources, 2, bytes);
    return LoopOf<dtype, op, 0>::run(to, sources, source_count, bytes);
  }

  template <DType dtype>
  static void scale(void* data, std::size_t count, std::uint32_t divisor) {
    using Format = decltype(real_format_of<dtype, false>());
    Quotient<M, Format>::run(static_cast<char*>(data), count * kItemBytes[static_cast<int>(dtype)],
                             divisor);
  }

  template <DType dtype>
  static void enter_mean(void* wire, const void* array, std::size_t count, std::uint32_t ranks) {
    using MeanOf = decltype(mean<dtype>());
    MeanOf::enter(static_cast<char*>(wire), static_cast<const char*>(array), count,
                  mean_factor(ranks));
  }

  template <DType dtype>
  static void leave_mean(void* array, const void* wire, std::size_t count, std::uint32_t ranks) {
    const float divisor = static_cast<float>(ranks) * mean_factor(ranks);  // exact
    using MeanOf = decltype(mean<dtype>());
    MeanOf::leave(static_cast<char*>(array), static_cast<const char*>(wire), count, divisor);
  }

  static CodecKernels codec(CodecKind kind) { return Codecs<M>::of(kind); }

  static constexpr CollectFunction kCollect = SparseScan<M>::collect;
  static constexpr ProductFunction kProduct = ThinProduct<M>::run;

 private:
  template <DType dtype, ReduceOp op, int sources>
  static constexpr auto loop() {
    using Format = decltype(format_of<dtype, op>());
    if constexpr (op == ReduceOp::kSum && dtype == DType::kFloat8E4M3) {
      return ByteSum<M, 3, 0x7f, Format, sources>{};
    } else if constexpr (op == ReduceOp::kSum && dtype == DType::kFloat8E5M2) {
      return ByteSum<M, 2, 0x7c, Format, sources>{};
    } else {
      return Fold<M, Format, decltype(step_of<dtype, op>()), sources>{};
    }
  }
  template <DType dtype, ReduceOp op, int sources>
  using LoopOf = decltype(loop<dtype, op, sources>());

  template <DType dtype>
  static constexpr auto mean() {
    using Format = decltype(real_format_of<dtype, false>());
    constexpr bool is_byte = kItemBytes[static_cast<int>(dtype)] == 1;
    return Mean<M, Format, std::conditional_t<is_byte, std::uint8_t, std::uint16_t>>{};
  }

  template <DType dtype, ReduceOp op>
  static constexpr auto format_of() {
    constexpr bool ordered = op == ReduceOp::kMin || op == ReduceOp::kMax;
    constexpr bool arithmetic = ordered || op == ReduceOp::kSum || op == ReduceOp::kProd;
    if constexpr (dtype == DType::kBool || !arithmetic) {
      return IntegerFormat<M, std::uint8_t>{};
    } else if constexpr (is_integer(dtype)) {
      using T = Integer<dtype>;
      return IntegerFormat<M, std::conditional_t<ordered, T, std::make_unsigned_t<T>>>{};
    } else if constexpr (ordered && is_small_float(dtype)) {
      return ordered_format_of<dtype, op == ReduceOp::kMin>();
    } else {
      return real_format_of<dtype, M::kConvertsHalf>();
    }
  }

  // `by_half`: whether 8-bit floats may be computed through float16.
  template <DType dtype, bool by_half>
  static constexpr auto real_format_of() {
    if constexpr (dtype == DType::kFloat32 || dtype == DType::kComplex64) {
      return Float32Format<M>{};
    } else if constexpr (dtype == DType::kFloat64 || dtype == DType::kComplex128) {
      return Float64Format<M>{};
    } else if constexpr (dtype == DType::kBFloat16) {
      return BFloat16Format<M>{};
    } else if constexpr (dtype == DType::kFloat16) {
      return std::conditional_t<M::kConvertsHalf, NativeHalfFormat<M>, Float16Format<M>>{};
    } else if constexpr (dtype == DType::kFloat8E4M3) {
      using Native = NativeByteFormat<M, E4M3Bytes<M>>;
      return std::conditional_t<by_half, Native, Float8E4M3Format<M>>{};
    } else {
      using Native = NativeByteFormat<M, E5M2Bytes<M>>;
      return std::conditional_t<by_half, Native, Float8E5M2Format<M>>{};
    }
  }

  template <DType dtype, bool smaller>
  static constexpr auto ordered_format_of() {
    if constexpr (dtype == DType::kFloat16) {
      return OrderedFormat<M, std::int16_t, 0x7c00, 0x7e00, smaller>{};
    } else if constexpr (dtype == DType::kBFloat16) {
      return OrderedFormat<M, std::int16_t, 0x7f80, 0x7fc0, smaller>{};
    } else if constexpr (dtype == DType::kFloat8E4M3) {
      return OrderedFormat<M, std::int8_t, 0x7e, 0x7f, smaller>{};  // its largest finite magnitude
    } else {
      return OrderedFormat<M, std::int8_t, 0x7c, 0x7e, smaller>{};
    }
  }

  template <DType dtype, ReduceOp op>
  static constexpr auto step_of() {
    constexpr bool is_bool = dtype == DType::kBool;
    if constexpr (op == ReduceOp::kBor ||
                  (is_bool && (op == ReduceOp::kSum || op == ReduceOp::kMax))) {
      return typename Steps<M>::Or{};
    } else if constexpr (op == ReduceOp::kBand || (is_bool && op != ReduceOp::kBxor)) {
      return typename Steps<M>::And{};
    } else if constexpr (op == ReduceOp::kBxor) {
      return typename Steps<M>::Xor{};
    } else if constexpr (op == ReduceOp::kMin) {
      return typename Steps<M>::Min{};
    } else if constexpr (op == ReduceOp::kMax) {
      return typename Steps<M>::Max{};
    } else if constexpr (op == ReduceOp::kSum) {
      return typename Steps<M>::Sum{};
    } else if constexpr (is_complex(dtype)) {
      return typename Steps<M>::ComplexProd{};
    } else {
      return typename Steps<M>::Prod{};
    }
  }
};

}  // namespace pycoll::kernels
