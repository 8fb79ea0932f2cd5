// Device code: combines sixteen bytes of elements with sixteen others, bit for bit as
// kernels/reference.cpp does. Bytes behind the last element are combined too, and their result is
// ignored. a*b+c keeps two roundings: the code is compiled without contraction.
//
// A kernel takes one of two kinds of reduction. FixedSum has a type known to the compiler. Any
// looks type and operation up for each pack, by a call. A fixed reduction for every pair of type
// and operation would make the build slow for pairs that are rare on devices.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/types.h"
#include "device/kernels/formats.h"
#include "device/kernels/pack.h"

namespace pycoll::device {

struct Sum {
  template <typename T>
  PYCOLL_DEVICE static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
    } else {
      return a + b;
    }
  }
  template <typename T>
  PYCOLL_DEVICE static Pair<T> apply(Pair<T> a, Pair<T> b) {
    return {a.real + b.real, a.imaginary + b.imaginary};
  }
};

struct Prod {
  template <typename T>
  PYCOLL_DEVICE static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    } else {
      return a * b;
    }
  }
  template <typename T>
  PYCOLL_DEVICE static Pair<T> apply(Pair<T> a, Pair<T> b) {
    return {a.real * b.real - a.imaginary * b.imaginary,
            a.real * b.imaginary + a.imaginary * b.real};
  }
};

// Whether a comes before b, with -0 < +0. Requires: neither is NaN.
template <typename T>
PYCOLL_DEVICE bool less(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a == b) return sign_bit(a) && !sign_bit(b);
  }
  return a < b;
}

template <bool wants_max>
struct Extreme {
  template <typename T>
  PYCOLL_DEVICE static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (is_nan(a) || is_nan(b)) return quiet_nan<T>();
    }
    if constexpr (wants_max) return less(a, b) ? b : a;
    return less(b, a) ? b : a;
  }
};
using Min = Extreme<false>;
using Max = Extreme<true>;

// One correctly rounded division.
struct Division {
  std::uint32_t divisor;

  template <typename T>
  PYCOLL_DEVICE T apply(T value) const {
    return value / static_cast<T>(divisor);
  }
  template <typename T>
  PYCOLL_DEVICE Pair<T> apply(Pair<T> value) const {
    return {apply(value.real), apply(value.imaginary)};
  }
};

template <typename Format>
struct Items {
  static constexpr int kCount = sizeof(Pack) / sizeof(typename Format::Storage);
  typename Format::Storage at[kCount];
};

template <typename Format, typename Step>
PYCOLL_DEVICE Pack combine_packs(Pack a, Pack b) {
  auto left = std::bit_cast<Items<Format>>(a);
  const auto right = std::bit_cast<Items<Format>>(b);
  PYCOLL_UNROLL
  for (int i = 0; i < Items<Format>::kCount; ++i) {
    left.at[i] =
        Format::encode(Step::apply(Format::decode(left.at[i]), Format::decode(right.at[i])));
  }
  return std::bit_cast<Pack>(left);
}

template <typename Format>
PYCOLL_DEVICE Pack divide_pack(Pack pack, Division division) {
  auto items = std::bit_cast<Items<Format>>(pack);
  PYCOLL_UNROLL
  for (int i = 0; i < Items<Format>::kCount; ++i) {
    items.at[i] = Format::encode(division.apply(Format::decode(items.at[i])));
  }
  return std::bit_cast<Pack>(items);
}

// Combines half a pack in a loop: far less code than combine_packs() where elements are small.
template <typename Format, typename Function>
PYCOLL_DEVICE std::uint64_t in_order(std::uint64_t a, std::uint64_t b, Function function) {
  using Storage = typename Format::Storage;
  std::uint64_t all = 0;
  PYCOLL_NO_UNROLL
  for (int shift = 0; shift < 64; shift += 8 * static_cast<int>(sizeof(Storage))) {
    const Storage made = Format::encode(function(Format::decode(static_cast<Storage>(a >> shift)),
                                                 Format::decode(static_cast<Storage>(b >> shift))));
    all |= static_cast<std::uint64_t>(static_cast<std::make_unsigned_t<Storage>>(made)) << shift;
  }
  return all;
}

template <typename Format>
inline constexpr bool kIsSmall = sizeof(typename Format::Storage) <= 2;

template <typename Format, typename Step>
PYCOLL_DEVICE Pack compact(Pack a, Pack b) {
  if constexpr (kIsSmall<Format>) {
    const auto step = [](typename Format::Value x, typename Format::Value y) {
      return Step::apply(x, y);
    };
    return {in_order<Format>(a.low, b.low, step), in_order<Format>(a.high, b.high, step)};
  } else {
    return combine_packs<Format, Step>(a, b);
  }
}

// Sums in one format. Several packs in flight per thread hide the latency of peer memory.
template <typename Format>
struct FixedSum {
  static constexpr int kInFlight = 4;
  PYCOLL_DEVICE Pack combine(Pack a, Pack b) const { return combine_packs<Format, Sum>(a, b); }
  PYCOLL_DEVICE Pack divide(Pack pack, std::uint32_t divisor) const {
    return divide_pack<Format>(pack, {divisor});
  }
};

// Any type and operation that kernels::combine_for() has a kernel for. Divides the types that
// kernels::scale_for() divides.
struct Any {
  static constexpr int kInFlight = 1;
  DType dtype;
  ReduceOp op;

  PYCOLL_DEVICE Pack combine(Pack a, Pack b) const { return combine_of(dtype, op, a, b); }
  PYCOLL_DEVICE Pack divide(Pack pack, std::uint32_t divisor) const {
    return divide_of(dtype, pack, divisor);
  }

 private:
  PYCOLL_DEVICE_CALL static Pack combine_of(DType dtype, ReduceOp op, Pack a, Pack b) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        return dtype == DType::kBool ? both<BitOr>(a, b) : by_ring<Sum>(dtype, a, b);
      case ReduceOp::kProd:
        return dtype == DType::kBool ? both<BitAnd>(a, b) : by_ring<Prod>(dtype, a, b);
      case ReduceOp::kMin:
        return dtype == DType::kBool ? both<BitAnd>(a, b) : by_order<Min>(dtype, a, b);
      case ReduceOp::kMax:
        return dtype == DType::kBool ? both<BitOr>(a, b) : by_order<Max>(dtype, a, b);
      case ReduceOp::kBand:
        return both<BitAnd>(a, b);
      case ReduceOp::kBor:
        return both<BitOr>(a, b);
      case ReduceOp::kBxor:
        return both<BitXor>(a, b);
      case ReduceOp::kUser:
      case ReduceOp::kLand:  // these combine in wire form
      case ReduceOp::kLor:
      case ReduceOp::kLxor:
      case ReduceOp::kMaxloc:
      case ReduceOp::kMinloc:
        break;
    }
    return a;
  }

  PYCOLL_DEVICE_CALL static Pack divide_of(DType dtype, Pack pack, std::uint32_t divisor) {
    const Division by{divisor};
    switch (dtype) {
      case DType::kFloat32:
      case DType::kComplex64:
        return divide_pack<Real<float>>(pack, by);
      case DType::kFloat64:
      case DType::kComplex128:
        return divide_pack<Real<double>>(pack, by);
      default:
        return pack;
    }
  }

  struct BitAnd {
    PYCOLL_DEVICE static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a & b; }
  };
  struct BitOr {
    PYCOLL_DEVICE static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a | b; }
  };
  struct BitXor {
    PYCOLL_DEVICE static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a ^ b; }
  };

  template <typename Step>
  PYCOLL_DEVICE static Pack both(Pack a, Pack b) {
    return {Step::apply(a.low, b.low), Step::apply(a.high, b.high)};
  }

  // Sums and products, which have the same bits for signed and unsigned.
  template <typename Step>
  PYCOLL_DEVICE static Pack by_ring(DType dtype, Pack a, Pack b) {
    // clang-format off
    switch (dtype) {
      case DType::kBool: break;
      case DType::kInt8: case DType::kUInt8: return compact<Integer<std::uint8_t>, Step>(a, b);
      case DType::kInt16: case DType::kUInt16: return compact<Integer<std::uint16_t>, Step>(a, b);
      case DType::kInt32: case DType::kUInt32: return compact<Integer<std::uint32_t>, Step>(a, b);
      case DType::kInt64: case DType::kUInt64: return compact<Integer<std::uint64_t>, Step>(a, b);
      case DType::kFloat16: return compact<Float16, Step>(a, b);
      case DType::kBFloat16: return compact<BFloat16, Step>(a, b);
      case DType::kFloat32: return compact<Real<float>, Step>(a, b);
      case DType::kFloat64: return compact<Real<double>, Step>(a, b);
      case DType::kComplex64: return compact<Complex<float>, Step>(a, b);
      case DType::kComplex128: return compact<Complex<double>, Step>(a, b);
      case DType::kFloat8E4M3: return compact<Float8E4M3, Step>(a, b);
      case DType::kFloat8E5M2: return compact<Float8E5M2, Step>(a, b);
    }
    // clang-format on
    return a;
  }

  template <typename Step>
  PYCOLL_DEVICE static Pack by_order(DType dtype, Pack a, Pack b) {
    // clang-format off
    switch (dtype) {
      case DType::kInt8: return compact<Integer<std::int8_t>, Step>(a, b);
      case DType::kInt16: return compact<Integer<std::int16_t>, Step>(a, b);
      case DType::kInt32: return compact<Integer<std::int32_t>, Step>(a, b);
      case DType::kInt64: return compact<Integer<std::int64_t>, Step>(a, b);
      case DType::kUInt8: return compact<Integer<std::uint8_t>, Step>(a, b);
      case DType::kUInt16: return compact<Integer<std::uint16_t>, Step>(a, b);
      case DType::kUInt32: return compact<Integer<std::uint32_t>, Step>(a, b);
      case DType::kUInt64: return compact<Integer<std::uint64_t>, Step>(a, b);
      case DType::kFloat16: return compact<Float16, Step>(a, b);
      case DType::kBFloat16: return compact<BFloat16, Step>(a, b);
      case DType::kFloat32: return compact<Real<float>, Step>(a, b);
      case DType::kFloat64: return compact<Real<double>, Step>(a, b);
      case DType::kFloat8E4M3: return compact<Float8E4M3, Step>(a, b);
      case DType::kFloat8E5M2: return compact<Float8E5M2, Step>(a, b);
      default: break;
    }
    // clang-format on
    return a;
  }
};

}  // namespace pycoll::device
