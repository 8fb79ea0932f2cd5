// The oracle: scalar code, one element at a time. Compiled without contraction of a*b+c.
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/backend.h"
#include "kernels/convert.h"
#include "kernels/table.h"

namespace pycoll::kernels {
namespace {

// Each format has the types Storage, as an element lies in memory, and Value, in which it is
// computed.
template <typename T>
struct Integer {
  using Storage = T;
  using Value = T;
  static Value decode(Storage stored) { return stored; }
  static Storage encode(Value value) { return value; }
};

template <typename T>
T canonical(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <typename T>
struct Real {
  using Storage = T;
  using Value = T;
  static Value decode(Storage stored) { return stored; }
  static Storage encode(Value value) { return canonical(value); }
};

template <typename T>
struct Complex {
  using Storage = std::complex<T>;
  using Value = std::complex<T>;
  static Value decode(Storage stored) { return stored; }
  static Storage encode(Value value) { return {canonical(value.real()), canonical(value.imag())}; }
};

template <typename Format>
struct Small : Format {
  using Value = float;
};

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
    } else {
      return a + b;
    }
  }
};

struct Prod {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    } else {
      return a * b;
    }
  }
  template <typename T>
  static std::complex<T> apply(std::complex<T> a, std::complex<T> b) {
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  }
};

// Whether a < b in the order with -0 < +0. Requires: neither is NaN.
template <typename T>
bool less(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a == b) return std::signbit(a) && !std::signbit(b);
  }
  return a < b;
}

template <typename T>
bool unordered(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(a) || std::isnan(b);
  return false;
}

struct Min {
  template <typename T>
  static T apply(T a, T b) {
    if (unordered(a, b)) return std::numeric_limits<T>::quiet_NaN();
    return less(b, a) ? b : a;
  }
};

struct Max {
  template <typename T>
  static T apply(T a, T b) {
    if (unordered(a, b)) return std::numeric_limits<T>::quiet_NaN();
    return less(a, b) ? b : a;
  }
};

struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename Format>
typename Format::Value load(const void* data, std::size_t index) {
  typename Format::Storage stored;
  std::memcpy(&stored, static_cast<const char*>(data) + index * sizeof(stored), sizeof(stored));
  return Format::decode(stored);
}

template <typename Format>
void store(void* data, std::size_t index, typename Format::Value value) {
  const typename Format::Storage stored = Format::encode(value);
  std::memcpy(static_cast<char*>(data) + index * sizeof(stored), &stored, sizeof(stored));
}

// One correctly rounded division.
template <typename T>
T divide(T value, std::uint32_t divisor) {
  return value / static_cast<T>(divisor);
}

template <typename T>
std::complex<T> divide(std::complex<T> value, std::uint32_t divisor) {
  return {divide(value.real(), divisor), divide(value.imag(), divisor)};
}

// clang-format off
template <DType> struct FormatOf;
template <> struct FormatOf<DType::kBool> { using Type = Integer<std::uint8_t>; };
template <> struct FormatOf<DType::kInt8> { using Type = Integer<std::int8_t>; };
template <> struct FormatOf<DType::kInt16> { using Type = Integer<std::int16_t>; };
template <> struct FormatOf<DType::kInt32> { using Type = Integer<std::int32_t>; };
template <> struct FormatOf<DType::kInt64> { using Type = Integer<std::int64_t>; };
template <> struct FormatOf<DType::kUInt8> { using Type = Integer<std::uint8_t>; };
template <> struct FormatOf<DType::kUInt16> { using Type = Integer<std::uint16_t>; };
template <> struct FormatOf<DType::kUInt32> { using Type = Integer<std::uint32_t>; };
template <> struct FormatOf<DType::kUInt64> { using Type = Integer<std::uint64_t>; };
template <> struct FormatOf<DType::kFloat16> { using Type = Small<Float16>; };
template <> struct FormatOf<DType::kBFloat16> { using Type = Small<BFloat16>; };
template <> struct FormatOf<DType::kFloat32> { using Type = Real<float>; };
template <> struct FormatOf<DType::kFloat64> { using Type = Real<double>; };
template <> struct FormatOf<DType::kComplex64> { using Type = Complex<float>; };
template <> struct FormatOf<DType::kComplex128> { using Type = Complex<double>; };
template <> struct FormatOf<DType::kFloat8E4M3> { using Type = Small<Float8E4M3>; };
template <> struct FormatOf<DType::kFloat8E5M2> { using Type = Small<Float8E5M2>; };

template <ReduceOp> struct StepOf;
template <> struct StepOf<ReduceOp::kSum> { using Type = Sum; };
template <> struct StepOf<ReduceOp::kProd> { using Type = Prod; };
template <> struct StepOf<ReduceOp::kMin> { using Type = Min; };
template <> struct StepOf<ReduceOp::kMax> { using Type = Max; };
template <> struct StepOf<ReduceOp::kBand> { using Type = And; };
template <> struct StepOf<ReduceOp::kBor> { using Type = Or; };
template <> struct StepOf<ReduceOp::kBxor> { using Type = Xor; };
// clang-format on

template <ReduceOp op>
struct BoolStepOf : StepOf<op> {};
template <>
struct BoolStepOf<ReduceOp::kSum> : StepOf<ReduceOp::kBor> {};
template <>
struct BoolStepOf<ReduceOp::kMax> : StepOf<ReduceOp::kBor> {};
template <>
struct BoolStepOf<ReduceOp::kProd> : StepOf<ReduceOp::kBand> {};
template <>
struct BoolStepOf<ReduceOp::kMin> : StepOf<ReduceOp::kBand> {};

struct Reference {
  template <DType dtype, ReduceOp op>
  static void combine(void* target, const void* const* sources, int source_count, std::size_t count,
                      void* /*context*/) {
    using Format = typename FormatOf<dtype>::Type;
    using Steps = std::conditional_t<dtype == DType::kBool, BoolStepOf<op>, StepOf<op>>;
    for (std::size_t i = 0; i < count; ++i) {
      auto value = load<Format>(sources[0], i);
      for (int k = 1; k < source_count; ++k) {
        const auto next = Steps::Type::apply(value, load<Format>(sources[k], i));
        value = Format::decode(Format::encode(next));
      }
      store<Format>(target, i, value);
    }
  }

  template <DType dtype>
  static void scale(void* data, std::size_t count, std::uint32_t divisor) {
    using Format = typename FormatOf<dtype>::Type;
    for (std::size_t i = 0; i < count; ++i) {
      store<Format>(data, i, divide(load<Format>(data, i), divisor));
    }
  }

  template <DType dtype>
  static void enter_mean(void* wire, const void* array, std::size_t count, std::uint32_t ranks) {
    using Format = typename FormatOf<dtype>::Type;
    for (std::size_t i = 0; i < count; ++i) {
      store<Real<float>>(wire, i, load<Format>(array, i) * mean_factor(ranks));
    }
  }

  template <DType dtype>
  static void leave_mean(void* array, const void* wire, std::size_t count, std::uint32_t ranks) {
    using Format = typename FormatOf<dtype>::Type;
    const float divisor = static_cast<float>(ranks) * mean_factor(ranks);
    for (std::size_t i = 0; i < count; ++i) {
      store<Format>(array, i, load<Real<float>>(wire, i) / divisor);
    }
  }

  static CodecKernels codec(CodecKind kind) { return kPortableBackend.codec(kind); }

  static std::size_t collect(std::uint32_t* places, float* sums, const float* values,
                             const float* rests, std::size_t count, std::uint32_t bound) {
    std::size_t found = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float value = rests == nullptr ? values[i] : sums[i] = values[i] + rests[i];
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      if ((bits & 0x7fffffffu) >= bound) places[found++] = static_cast<std::uint32_t>(i);
    }
    return found;
  }

  static void product(float* target, const float* base, const float* p, const float* q,
                      std::size_t rows, std::size_t columns, std::size_t rank) {
    for (std::size_t i = 0; i < rows * columns; ++i) {
      const float* row = p + i / columns * rank;
      const float* column = q + i % columns;
      float sum = row[0] * column[0];
      for (std::size_t k = 1; k < rank; ++k) sum += row[k] * column[k * columns];
      target[i] = base == nullptr ? sum : base[i] - sum;
    }
  }

  static constexpr CollectFunction kCollect = collect;
  static constexpr ProductFunction kProduct = product;
};

}  // namespace

const Backend kReferenceBackend = kBackendOf<Reference>;

}  // namespace pycoll::kernels
