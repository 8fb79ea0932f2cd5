// Device code: the wire forms of averages and of logical reductions, one element at a time, bit for
// bit as kernels/wire.cpp and kernels/reference.cpp make them. Pairs have none on devices.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/types.h"
#include "device/kernels/formats.h"
#include "device/kernels/pack.h"

namespace pycoll::device {

// 2^-k with the smallest k with 2^k >= ranks.
PYCOLL_DEVICE float mean_factor(std::uint32_t ranks) {
  std::uint32_t k = 0;
  while ((std::uint64_t{1} << k) < ranks) ++k;
  return std::bit_cast<float>((127 - k) << 23);
}

template <typename Format>
PYCOLL_DEVICE Pack enter_small(std::uint32_t ranks, Pack stored) {
  const auto value = Format::decode(static_cast<typename Format::Storage>(stored.low));
  return {std::bit_cast<std::uint32_t>(Real<float>::encode(value * mean_factor(ranks))), 0};
}

template <typename Format>
PYCOLL_DEVICE Pack leave_small(std::uint32_t ranks, Pack wire) {
  const float divisor = static_cast<float>(ranks) * mean_factor(ranks);
  const auto sum = std::bit_cast<float>(static_cast<std::uint32_t>(wire.low));
  return {Format::encode(sum / divisor), 0};
}

// A T travels as a Wire, which is at least as wide.
template <typename T, typename Wire>
PYCOLL_DEVICE Pack enter_integer(Pack stored) {
  using Unsigned = std::make_unsigned_t<Wire>;
  return {static_cast<Unsigned>(static_cast<Wire>(static_cast<T>(stored.low))), 0};
}

template <typename T, typename Wire>
PYCOLL_DEVICE Pack leave_integer(std::uint32_t ranks, Pack wire) {
  const Wire mean = static_cast<Wire>(wire.low) / static_cast<Wire>(ranks);
  return {static_cast<std::make_unsigned_t<T>>(static_cast<T>(mean)), 0};
}

// 64-bit integers travel as quotient and remainder by the number of ranks.
template <typename T>
PYCOLL_DEVICE Pack enter_long(std::uint32_t ranks, Pack stored) {
  const T value = static_cast<T>(stored.low);
  const T by = static_cast<T>(ranks);
  return {static_cast<std::uint64_t>(value / by), static_cast<std::uint64_t>(value % by)};
}

template <typename T>
PYCOLL_DEVICE Pack leave_long(std::uint32_t ranks, Pack wire) {
  const T by = static_cast<T>(ranks);
  const T rests = static_cast<T>(wire.high);
  T whole = static_cast<T>(wire.low) + rests / by;
  if constexpr (std::is_signed_v<T>) {
    const T rest = rests % by;
    if (whole > 0 && rest < 0) --whole;
    if (whole < 0 && rest > 0) ++whole;
  }
  return {static_cast<std::uint64_t>(whole), 0};
}

// Whether an element is not zero; -0.0 is zero.
PYCOLL_DEVICE bool is_true(DType dtype, Pack stored) {
  // clang-format off
  switch (dtype) {
    case DType::kFloat16: case DType::kBFloat16: return (stored.low & 0x7fff) != 0;
    case DType::kFloat8E4M3: case DType::kFloat8E5M2: return (stored.low & 0x7f) != 0;
    case DType::kFloat32: return (stored.low & 0x7fffffff) != 0;
    case DType::kFloat64: return stored.low << 1 != 0;
    case DType::kComplex64: return (stored.low & 0x7fffffff7fffffff) != 0;
    case DType::kComplex128: return stored.low << 1 != 0 || stored.high << 1 != 0;
    default: return stored.low != 0;
  }
  // clang-format on
}

PYCOLL_DEVICE std::uint64_t one_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 0x3c00;
    case DType::kBFloat16:
      return 0x3f80;
    case DType::kFloat8E4M3:
      return 0x38;
    case DType::kFloat8E5M2:
      return 0x3c;
    case DType::kFloat32:
    case DType::kComplex64:
      return 0x3f800000;
    case DType::kFloat64:
    case DType::kComplex128:
      return 0x3ff0000000000000;
    default:
      return 1;
  }
}

// The wire form of an element, in the low bytes of a pack. Requires: kernels::wire_form() has a
// form for `dtype` and `op` that is not of pairs.
PYCOLL_DEVICE_CALL Pack make_wire_element(DType dtype, ReduceOp op, std::uint32_t ranks,
                                          Pack stored) {
  if (op != ReduceOp::kAvg) return {is_true(dtype, stored) ? std::uint64_t{1} : 0, 0};
  // clang-format off
  switch (dtype) {
    case DType::kInt8: return enter_integer<std::int8_t, std::int32_t>(stored);
    case DType::kInt16: return enter_integer<std::int16_t, std::int32_t>(stored);
    case DType::kInt32: return enter_integer<std::int32_t, std::int64_t>(stored);
    case DType::kInt64: return enter_long<std::int64_t>(ranks, stored);
    case DType::kUInt8: return enter_integer<std::uint8_t, std::uint32_t>(stored);
    case DType::kUInt16: return enter_integer<std::uint16_t, std::uint32_t>(stored);
    case DType::kUInt32: return enter_integer<std::uint32_t, std::uint64_t>(stored);
    case DType::kUInt64: return enter_long<std::uint64_t>(ranks, stored);
    case DType::kFloat16: return enter_small<Float16>(ranks, stored);
    case DType::kBFloat16: return enter_small<BFloat16>(ranks, stored);
    case DType::kFloat8E4M3: return enter_small<Float8E4M3>(ranks, stored);
    case DType::kFloat8E5M2: return enter_small<Float8E5M2>(ranks, stored);
    default: return stored;
  }
  // clang-format on
}

// The element of a combined wire form: the inverse of make_wire_element().
PYCOLL_DEVICE_CALL Pack make_element(DType dtype, ReduceOp op, std::uint32_t ranks, Pack wire) {
  if (op != ReduceOp::kAvg) return {(wire.low & 1) != 0 ? one_of(dtype) : 0, 0};
  // clang-format off
  switch (dtype) {
    case DType::kInt8: return leave_integer<std::int8_t, std::int32_t>(ranks, wire);
    case DType::kInt16: return leave_integer<std::int16_t, std::int32_t>(ranks, wire);
    case DType::kInt32: return leave_integer<std::int32_t, std::int64_t>(ranks, wire);
    case DType::kInt64: return leave_long<std::int64_t>(ranks, wire);
    case DType::kUInt8: return leave_integer<std::uint8_t, std::uint32_t>(ranks, wire);
    case DType::kUInt16: return leave_integer<std::uint16_t, std::uint32_t>(ranks, wire);
    case DType::kUInt32: return leave_integer<std::uint32_t, std::uint64_t>(ranks, wire);
    case DType::kUInt64: return leave_long<std::uint64_t>(ranks, wire);
    case DType::kFloat16: return leave_small<Float16>(ranks, wire);
    case DType::kBFloat16: return leave_small<BFloat16>(ranks, wire);
    case DType::kFloat8E4M3: return leave_small<Float8E4M3>(ranks, wire);
    case DType::kFloat8E5M2: return leave_small<Float8E5M2>(ranks, wire);
    default: return wire;
  }
  // clang-format on
}

}  // namespace pycoll::device
