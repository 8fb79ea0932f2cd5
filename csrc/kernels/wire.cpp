// Wire forms of integers, truth values and pairs: scalar code, shared by all instruction sets. The
// backends have kernels for the wire forms of small floats.
#include "kernels/wire.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/assert.h"
#include "kernels/backend.h"
#include "kernels/convert.h"
#include "kernels/table.h"

namespace pycoll::kernels {
namespace wire {
namespace {

template <typename T>
T load(const void* memory, std::size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(memory) + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(void* memory, std::size_t index, T value) {
  std::memcpy(static_cast<char*>(memory) + index * sizeof(T), &value, sizeof(T));
}

// ---- Averages of integers

template <typename T, typename Wire>
struct IntegerMean {
  static void enter(void* made, const void* array, std::size_t groups, std::uint32_t /*ranks*/) {
    for (std::size_t i = 0; i < groups; ++i) store(made, i, static_cast<Wire>(load<T>(array, i)));
  }
  static void leave(void* array, const void* found, std::size_t groups, std::uint32_t ranks) {
    using Signed = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    for (std::size_t i = 0; i < groups; ++i) {
      const auto sum = static_cast<Signed>(load<Wire>(found, i));
      store(array, i, static_cast<T>(sum / static_cast<Signed>(ranks)));
    }
  }
};

// The sum of the quotients is at most as large as a 64-bit value, and the sum of the remainders is
// below ranks^2. Neither overflows, in any order.
template <typename T>
struct LongMean {
  static void enter(void* made, const void* array, std::size_t groups, std::uint32_t ranks) {
    const auto by = static_cast<T>(ranks);
    for (std::size_t i = 0; i < groups; ++i) {
      const T value = load<T>(array, i);
      store(made, 2 * i, static_cast<T>(value / by));
      store(made, 2 * i + 1, static_cast<T>(value % by));
    }
  }
  static void leave(void* array, const void* found, std::size_t groups, std::uint32_t ranks) {
    const auto by = static_cast<T>(ranks);
    for (std::size_t i = 0; i < groups; ++i) {
      const T rests = load<T>(found, 2 * i + 1);
      T whole = static_cast<T>(load<T>(found, 2 * i) + rests / by);
      if constexpr (std::is_signed_v<T>) {
        // The average is whole + rest / ranks. It rounds towards zero once both have the same sign.
        const T rest = rests % by;
        if (whole > 0 && rest < 0) --whole;
        if (whole < 0 && rest > 0) ++whole;
      }
      store(array, i, whole);
    }
  }
};

// ---- Formats of all dtypes

template <typename T>
struct Plain {
  using Storage = T;
  static bool is_true(T value) { return value != T{0}; }
  static T one() { return T{1}; }
};

template <typename T>
struct Complex {
  struct Storage {
    T real;
    T imaginary;
  };
  static bool is_true(Storage value) { return value.real != T{0} || value.imaginary != T{0}; }
  static Storage one() { return {T{1}, T{0}}; }
};

template <typename Format>
struct Small {
  using Storage = typename Format::Storage;
  static bool is_true(Storage value) { return Format::decode(value) != 0; }
  static Storage one() { return Format::encode(1); }
};

// clang-format off
template <DType> struct ValueOf;
template <> struct ValueOf<DType::kBool> { using Type = Plain<std::uint8_t>; };
template <> struct ValueOf<DType::kInt8> { using Type = Plain<std::int8_t>; };
template <> struct ValueOf<DType::kInt16> { using Type = Plain<std::int16_t>; };
template <> struct ValueOf<DType::kInt32> { using Type = Plain<std::int32_t>; };
template <> struct ValueOf<DType::kInt64> { using Type = Plain<std::int64_t>; };
template <> struct ValueOf<DType::kUInt8> { using Type = Plain<std::uint8_t>; };
template <> struct ValueOf<DType::kUInt16> { using Type = Plain<std::uint16_t>; };
template <> struct ValueOf<DType::kUInt32> { using Type = Plain<std::uint32_t>; };
template <> struct ValueOf<DType::kUInt64> { using Type = Plain<std::uint64_t>; };
template <> struct ValueOf<DType::kFloat16> { using Type = Small<Float16>; };
template <> struct ValueOf<DType::kBFloat16> { using Type = Small<BFloat16>; };
template <> struct ValueOf<DType::kFloat32> { using Type = Plain<float>; };
template <> struct ValueOf<DType::kFloat64> { using Type = Plain<double>; };
template <> struct ValueOf<DType::kComplex64> { using Type = Complex<float>; };
template <> struct ValueOf<DType::kComplex128> { using Type = Complex<double>; };
template <> struct ValueOf<DType::kFloat8E4M3> { using Type = Small<Float8E4M3>; };
template <> struct ValueOf<DType::kFloat8E5M2> { using Type = Small<Float8E5M2>; };
// clang-format on

// ---- Truth values

template <DType dtype>
struct Truth {
  using Value = typename ValueOf<dtype>::Type;
  using Storage = typename Value::Storage;

  static void enter(void* made, const void* array, std::size_t groups, std::uint32_t /*ranks*/) {
    for (std::size_t i = 0; i < groups; ++i) {
      store(made, i, static_cast<std::uint8_t>(Value::is_true(load<Storage>(array, i))));
    }
  }
  static void leave(void* array, const void* found, std::size_t groups, std::uint32_t /*ranks*/) {
    const Storage values[] = {Storage{}, Value::one()};
    for (std::size_t i = 0; i < groups; ++i) {
      store(array, i, values[load<std::uint8_t>(found, i) & 1]);
    }
  }
};

// ---- Pairs of a value and its location

using Key = std::int64_t;

struct Pair {
  Key value;
  Key place;
};

// Maps each element to an integer key of the same order. Zeros of both signs have the same key. NaN
// has the highest key for maxloc and the lowest for minloc, so that it always wins.
template <DType dtype, bool wants_max>
struct Order {
  using Value = typename ValueOf<dtype>::Type;
  using Storage = typename Value::Storage;
  static constexpr Key kHighest = std::numeric_limits<Key>::max();
  static constexpr Key kLowest = std::numeric_limits<Key>::min();
  static constexpr Key kNan = wants_max ? kHighest : kLowest;

  static Key key(Storage stored) {
    if constexpr (is_integer(dtype)) {
      if constexpr (dtype != DType::kUInt64) return static_cast<Key>(stored);
      return static_cast<Key>(static_cast<std::uint64_t>(stored) ^ (std::uint64_t{1} << 63));
    } else {
      const double value = decode(stored);
      if (std::isnan(value)) return kNan;
      return value == 0 ? 0 : flip_negative(std::bit_cast<Key>(value));
    }
  }

  static Storage storage_of(Key key) {
    if constexpr (is_integer(dtype)) {
      if constexpr (dtype != DType::kUInt64) return static_cast<Storage>(key);
      return static_cast<Storage>(static_cast<std::uint64_t>(key) ^ (std::uint64_t{1} << 63));
    } else {
      if (key == kNan) return encode(std::numeric_limits<double>::quiet_NaN());
      return encode(std::bit_cast<double>(flip_negative(key)));
    }
  }

 private:
  // Negative numbers are stored as sign and magnitude. Flipping their magnitude bits gives integers
  // of the same order. The function is its own inverse.
  static Key flip_negative(Key bits) { return bits < 0 ? bits ^ kHighest : bits; }

  static double decode(Storage stored) {
    if constexpr (std::is_floating_point_v<Storage>) {
      return stored;
    } else {
      return FormatOf<dtype>::decode(stored);
    }
  }
  // Exact, because the key came from a value of this type.
  static Storage encode(double value) {
    if constexpr (std::is_floating_point_v<Storage>) {
      return static_cast<Storage>(value);
    } else {
      return FormatOf<dtype>::encode(static_cast<float>(value));
    }
  }

  template <DType small>
  using FormatOf = std::conditional_t<
      small == DType::kFloat16, Float16,
      std::conditional_t<small == DType::kBFloat16, BFloat16,
                         std::conditional_t<small == DType::kFloat8E4M3, Float8E4M3, Float8E5M2>>>;
};

template <DType dtype, bool wants_max>
struct Pairs {
  using In = Order<dtype, wants_max>;
  using Storage = typename In::Storage;

  static void enter(void* made, const void* array, std::size_t groups, std::uint32_t /*ranks*/) {
    for (std::size_t i = 0; i < groups; ++i) {
      const Key value = In::key(load<Storage>(array, 2 * i));
      store(made, i, Pair{value, In::key(load<Storage>(array, 2 * i + 1))});
    }
  }
  static void leave(void* array, const void* found, std::size_t groups, std::uint32_t /*ranks*/) {
    for (std::size_t i = 0; i < groups; ++i) {
      const Pair pair = load<Pair>(found, i);
      store(array, 2 * i, In::storage_of(pair.value));
      store(array, 2 * i + 1, In::storage_of(pair.place));
    }
  }
};

// Selects by a total order of pairs: the value first, then the lower location.
template <bool wants_max>
void choose(void* target, const void* const* sources, int source_count, std::size_t count,
            void* /*context*/) {
  for (std::size_t i = 0; i < count; ++i) {
    Pair best = load<Pair>(sources[0], i);
    for (int k = 1; k < source_count; ++k) {
      const Pair other = load<Pair>(sources[k], i);
      const bool better = wants_max ? other.value > best.value : other.value < best.value;
      if (better || (other.value == best.value && other.place < best.place)) best = other;
    }
    store(target, i, best);
  }
}

// ---- Selection by dtype and operation

template <typename Functions>
constexpr WireForm form_of(DType travels, Combine combine, std::uint8_t array_items = 1,
                           std::uint8_t wire_items = 1) {
  return {Functions::enter, Functions::leave, combine, travels, array_items, wire_items};
}

template <DType dtype>
WireForm truth(ReduceOp op, Isa isa) {
  const ReduceOp step = op == ReduceOp::kLand  ? ReduceOp::kBand
                        : op == ReduceOp::kLor ? ReduceOp::kBor
                                               : ReduceOp::kBxor;
  return form_of<Truth<dtype>>(DType::kBool, combine_for(DType::kBool, step, isa));
}

template <DType dtype>
WireForm pairs(ReduceOp op) {
  if constexpr (dtype == DType::kBool || is_complex(dtype)) {
    return {};
  } else if (op == ReduceOp::kMaxloc) {
    return form_of<Pairs<dtype, true>>(DType::kComplex128, {choose<true>, nullptr}, 2, 1);
  } else {
    return form_of<Pairs<dtype, false>>(DType::kComplex128, {choose<false>, nullptr}, 2, 1);
  }
}

template <DType dtype>
WireForm mean(Isa isa) {
  using T = typename ValueOf<dtype>::Type::Storage;
  if constexpr (is_integer(dtype)) {
    if constexpr (sizeof(T) == 8) {
      const Combine sum = combine_for(DType::kInt64, ReduceOp::kSum, isa);
      return form_of<LongMean<T>>(DType::kInt64, sum, 1, 2);
    } else {
      constexpr bool is_short = sizeof(T) < 4;
      using Narrow = std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>;
      using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
      constexpr DType travels = is_short ? DType::kInt32 : DType::kInt64;
      return form_of<IntegerMean<T, std::conditional_t<is_short, Narrow, Wide>>>(
          travels, combine_for(travels, ReduceOp::kSum, isa));
    }
  } else if constexpr (is_small_float(dtype)) {
    WireForm form;
    form.enter = backend_of(isa).enter_mean(dtype);
    form.leave = backend_of(isa).leave_mean(dtype);
    form.combine = combine_for(DType::kFloat32, ReduceOp::kSum, isa);
    form.dtype = DType::kFloat32;
    return form;
  } else {
    return {};
  }
}

template <DType dtype>
WireForm form_for(ReduceOp op, Isa isa) {
  switch (op) {
    case ReduceOp::kAvg:
      return mean<dtype>(isa);
    case ReduceOp::kLand:
    case ReduceOp::kLor:
    case ReduceOp::kLxor:
      return truth<dtype>(op, isa);
    case ReduceOp::kMaxloc:
    case ReduceOp::kMinloc:
      return pairs<dtype>(op);
    default:
      return {};
  }
}

}  // namespace
}  // namespace wire

WireForm wire_form(DType dtype, ReduceOp op, Isa isa) {
  using wire::form_for;
  PYCOLL_ASSERT(available(isa), "wire_form: instruction set %d is not available",
                static_cast<int>(isa));
  // clang-format off
  switch (dtype) {
    case DType::kBool: return form_for<DType::kBool>(op, isa);
    case DType::kInt8: return form_for<DType::kInt8>(op, isa);
    case DType::kInt16: return form_for<DType::kInt16>(op, isa);
    case DType::kInt32: return form_for<DType::kInt32>(op, isa);
    case DType::kInt64: return form_for<DType::kInt64>(op, isa);
    case DType::kUInt8: return form_for<DType::kUInt8>(op, isa);
    case DType::kUInt16: return form_for<DType::kUInt16>(op, isa);
    case DType::kUInt32: return form_for<DType::kUInt32>(op, isa);
    case DType::kUInt64: return form_for<DType::kUInt64>(op, isa);
    case DType::kFloat16: return form_for<DType::kFloat16>(op, isa);
    case DType::kBFloat16: return form_for<DType::kBFloat16>(op, isa);
    case DType::kFloat32: return form_for<DType::kFloat32>(op, isa);
    case DType::kFloat64: return form_for<DType::kFloat64>(op, isa);
    case DType::kComplex64: return form_for<DType::kComplex64>(op, isa);
    case DType::kComplex128: return form_for<DType::kComplex128>(op, isa);
    case DType::kFloat8E4M3: return form_for<DType::kFloat8E4M3>(op, isa);
    case DType::kFloat8E5M2: return form_for<DType::kFloat8E5M2>(op, isa);
  }
  // clang-format on
  return {};
}

}  // namespace pycoll::kernels
