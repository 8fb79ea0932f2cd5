// The reference itself, against arithmetic that shares nothing with it: exhaustive where a type is
// small.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/convert.h"
#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using kernels::Isa;

template <typename T>
std::vector<T> combine(DType dtype, ReduceOp op, Isa isa, const std::vector<std::vector<T>>& from) {
  std::vector<const void*> sources;
  for (const auto& one : from) sources.push_back(one.data());
  std::vector<T> result(from[0].size());
  const std::size_t count = result.size() * sizeof(T) / item_bytes(dtype);
  kernels::combine_for(dtype, op, isa)
      .function(result.data(), sources.data(), static_cast<int>(from.size()), count, nullptr);
  return result;
}

template <typename T>
T reduce(DType dtype, ReduceOp op, T a, T b) {
  return combine<T>(dtype, op, Isa::kReference, {{a}, {b}})[0];
}

// What IEEE 754 says a pattern means, in double; `finite_top`: the top exponent holds numbers.
double meaning(unsigned pattern, int exponent_bits, int mantissa_bits, bool finite_top) {
  const int exponent = static_cast<int>(pattern >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double fraction =
      static_cast<double>(pattern & ((1u << mantissa_bits) - 1)) / (1 << mantissa_bits);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const bool top = exponent == (1 << exponent_bits) - 1;
  const double sign = (pattern >> (exponent_bits + mantissa_bits) & 1u) != 0 ? -1 : 1;
  if (top && !finite_top) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const unsigned all_ones = (1u << (exponent_bits + mantissa_bits)) - 1;
  if (finite_top && (pattern & all_ones) == all_ones) return std::nan("");
  if (exponent == 0) return sign * fraction * std::pow(2.0, 1 - bias);
  return sign * (1 + fraction) * std::pow(2.0, exponent - bias);
}

struct Small {
  const char* name;
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
  bool finite_top;
  unsigned nan;
  float (*decode)(unsigned);
  unsigned (*encode)(float);

  double value(unsigned pattern) const {
    return meaning(pattern, exponent_bits, mantissa_bits, finite_top);
  }
  unsigned sign() const { return 1u << (exponent_bits + mantissa_bits); }
  // Patterns 0 .. end() - 1 are the finite numbers from zero up.
  unsigned end() const {
    unsigned pattern = 0;
    while (std::isfinite(value(pattern))) ++pattern;
    return pattern;
  }
};

template <typename Format>
Small small(const char* name, DType dtype, int exponent_bits, bool finite_top, unsigned nan) {
  using Storage = typename Format::Storage;
  const int mantissa_bits = static_cast<int>(8 * sizeof(Storage)) - 1 - exponent_bits;
  return {name,
          dtype,
          exponent_bits,
          mantissa_bits,
          finite_top,
          nan,
          [](unsigned pattern) { return Format::decode(static_cast<Storage>(pattern)); },
          [](float value) { return static_cast<unsigned>(Format::encode(value)); }};
}

std::vector<Small> small_types() {
  return {small<kernels::Float16>("float16", DType::kFloat16, 5, false, 0x7e00),
          small<kernels::BFloat16>("bfloat16", DType::kBFloat16, 8, false, 0x7fc0),
          small<kernels::Float8E4M3>("float8_e4m3", DType::kFloat8E4M3, 4, true, 0x7f),
          small<kernels::Float8E5M2>("float8_e5m2", DType::kFloat8E5M2, 5, false, 0x7e)};
}

TEST(decoding_means_what_the_standard_says_and_encoding_returns_it) {
  for (const Small& type : small_types()) {
    for (unsigned pattern = 0; pattern < 2 * type.sign(); ++pattern) {
      const double expected = type.value(pattern);
      const float decoded = type.decode(pattern);
      const bool same = std::isnan(expected) ? std::isnan(decoded)
                                             : static_cast<double>(decoded) == expected &&
                                                   std::signbit(decoded) == std::signbit(expected);
      CHECK(same, "%s 0x%x decodes to %g, expected %g", type.name, pattern, decoded, expected);
      const unsigned back = std::isnan(expected) ? type.nan : pattern;
      CHECK(type.encode(decoded) == back, "%s 0x%x returns as 0x%x, expected 0x%x", type.name,
            pattern, type.encode(decoded), back);
    }
  }
}

void check_encode(const Small& type, double value, unsigned expected) {
  const auto exact = static_cast<float>(value);
  CHECK(static_cast<double>(exact) == value, "%s: %.17g is no float32", type.name, value);
  CHECK(type.encode(exact) == expected, "%s: %.9g encodes as 0x%x, expected 0x%x", type.name, exact,
        type.encode(exact), expected);
  const unsigned negated = expected == type.nan ? expected : expected | type.sign();
  CHECK(type.encode(-exact) == negated, "%s: %.9g encodes as 0x%x, expected 0x%x", type.name,
        -exact, type.encode(-exact), negated);
}

// Rounding is monotonic, so the midpoints and their neighbours decide every float32.
TEST(encoding_rounds_to_nearest_and_ties_to_even) {
  for (const Small& type : small_types()) {
    const unsigned end = type.end();
    const unsigned above_all = type.finite_top ? type.nan : end;
    const double last_step = type.value(end - 1) - type.value(end - 2);
    for (unsigned low = 0; low < end; ++low) {
      const bool last = low + 1 == end;
      const unsigned high = last ? above_all : low + 1;
      const double next = last ? type.value(low) + last_step : type.value(high);
      const double middle = (type.value(low) + next) / 2;
      const auto tie = static_cast<float>(middle);
      check_encode(type, middle, low % 2 == 0 ? low : high);
      check_encode(type, std::nextafter(tie, 0.0f), low);
      check_encode(type, std::nextafter(tie, std::numeric_limits<float>::infinity()), high);
    }
    CHECK(type.encode(std::numeric_limits<float>::infinity()) == above_all, "%s: infinity",
          type.name);
    CHECK(type.encode(std::numeric_limits<float>::max()) == above_all, "%s: largest", type.name);
    CHECK(type.encode(-std::numeric_limits<float>::quiet_NaN()) == type.nan, "%s: NaN", type.name);
  }
}

// The pattern nearest to a float32 among all numbers of the type, by looking at each.
unsigned nearest(const Small& type, double value) {
  if (std::isnan(value)) return type.nan;
  const unsigned sign = std::signbit(value) ? type.sign() : 0;
  const unsigned end = type.end();
  const double magnitude = std::fabs(value);
  const double last = type.value(end - 1);
  const double limit = last + (last - type.value(end - 2)) / 2;
  const bool top_is_even = (end - 1) % 2 == 0;
  if (magnitude > limit || (magnitude == limit && !top_is_even)) {
    return type.finite_top ? type.nan : end | sign;
  }
  unsigned best = 0;
  for (unsigned one = 1; one < end; ++one) {
    const double now = std::fabs(type.value(one) - magnitude);
    const double before = std::fabs(type.value(best) - magnitude);
    if (now < before || (now == before && one % 2 == 0)) best = one;
  }
  return best | sign;
}

double real_result(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kSum) return static_cast<double>(static_cast<float>(a + b));
  if (op == ReduceOp::kProd) return static_cast<double>(static_cast<float>(a * b));
  if (std::isnan(a) || std::isnan(b)) return std::nan("");
  const bool a_first = a < b || (a == b && std::signbit(a));
  return a_first == (op == ReduceOp::kMin) ? a : b;
}

constexpr ReduceOp kRealOps[] = {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax};

struct Pairs {
  std::vector<std::uint8_t> a;
  std::vector<std::uint8_t> b;
  std::vector<std::uint8_t> expected;

  void add(unsigned first, unsigned second, unsigned result) {
    a.push_back(static_cast<std::uint8_t>(first));
    b.push_back(static_cast<std::uint8_t>(second));
    expected.push_back(static_cast<std::uint8_t>(result));
  }
};

void check_pairs(const Small& type, ReduceOp op, const Pairs& pairs) {
  std::vector<Isa> isas = testing::fast_isas();
  isas.push_back(Isa::kReference);
  // Adding -0 or multiplying by 1 changes nothing; the lesser or greater of a number and itself is
  // that number. So loops over more sources meet the same pairs.
  std::vector<std::uint8_t> neutral = pairs.expected;
  for (std::size_t i = 0; i < neutral.size(); ++i) {
    if (op == ReduceOp::kSum) neutral[i] = static_cast<std::uint8_t>(type.sign());
    if (op == ReduceOp::kProd) neutral[i] = static_cast<std::uint8_t>(type.encode(1.0f));
  }
  std::vector<std::vector<std::uint8_t>> from{pairs.a, pairs.b};
  while (from.size() <= kernels::kSourcesMax) {
    for (const Isa isa : isas) {
      const auto got = combine<std::uint8_t>(type.dtype, op, isa, from);
      for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK(got[i] == pairs.expected[i],
              "%s %s of %zu on %s: 0x%x, 0x%x gives 0x%x, expected 0x%x", type.name,
              name_of(op).data(), from.size(), kernels::name_of(isa).data(), pairs.a[i], pairs.b[i],
              got[i], pairs.expected[i]);
      }
    }
    from.push_back(neutral);
  }
}

// All pairs in their order, where nearly every stretch has an infinity, a NaN or an overflow; and
// those without one by themselves, since kernels may leave whole stretches with one to slower code.
TEST(float8_pairs_exhaustively_on_every_instruction_set) {
  for (const Small& type : small_types()) {
    if (item_bytes(type.dtype) != 1) continue;
    const unsigned end = type.end();
    const unsigned magnitude = type.sign() - 1;
    for (const ReduceOp op : kRealOps) {
      Pairs all;
      Pairs ordinary;
      for (unsigned pair = 0; pair < 65536; ++pair) {
        const unsigned a = pair >> 8;
        const unsigned b = pair & 0xffu;
        const unsigned result = nearest(type, real_result(op, type.value(a), type.value(b)));
        all.add(a, b, result);
        if ((a & magnitude) < end && (b & magnitude) < end && (result & magnitude) < end) {
          ordinary.add(a, b, result);
        }
      }
      check_pairs(type, op, all);
      check_pairs(type, op, ordinary);
    }
  }
}

// Each 16-bit number with partners over the whole range: all patterns meet every instruction set.
TEST(sixteen_bit_numbers_exhaustively_on_every_instruction_set) {
  std::vector<std::uint16_t> all;
  for (unsigned pattern = 0; pattern < 65536; ++pattern) {
    all.push_back(static_cast<std::uint16_t>(pattern));
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const unsigned partner : {0x0000u, 0x8000u, 0x0001u, 0x83ffu, 0x3c00u, 0x3f80u, 0xbc01u,
                                   0x3f81u, 0x7bffu, 0xff7fu, 0x7c00u, 0xff80u, 0x7e01u}) {
      const std::vector<std::uint16_t> other(all.size(), static_cast<std::uint16_t>(partner));
      for (const ReduceOp op : kRealOps) {
        const auto expected = combine<std::uint16_t>(dtype, op, Isa::kReference, {all, other});
        for (const Isa isa : testing::fast_isas()) {
          const auto got = combine<std::uint16_t>(dtype, op, isa, {all, other});
          for (std::size_t i = 0; i < all.size(); ++i) {
            CHECK(got[i] == expected[i], "%s %s on %s: 0x%zx, 0x%x gives 0x%x, expected 0x%x",
                  name_of(dtype).data(), name_of(op).data(), kernels::name_of(isa).data(), i,
                  partner, got[i], expected[i]);
          }
        }
      }
    }
  }
}

template <typename T>
void check_bytes_exhaustively(DType dtype) {
  for (int a = std::numeric_limits<T>::min(); a <= std::numeric_limits<T>::max(); ++a) {
    for (int b = std::numeric_limits<T>::min(); b <= std::numeric_limits<T>::max(); ++b) {
      const int expected[] = {a + b, a * b, std::min(a, b), std::max(a, b),
                              a + b, a & b, a | b,          a ^ b};
      for (int op = 0; op < static_cast<int>(std::size(expected)); ++op) {
        const T got =
            reduce<T>(dtype, static_cast<ReduceOp>(op), static_cast<T>(a), static_cast<T>(b));
        CHECK(got == static_cast<T>(expected[op]), "%s %s: %d, %d gives %d", name_of(dtype).data(),
              name_of(static_cast<ReduceOp>(op)).data(), a, b, got);
      }
    }
  }
}

TEST(bytes_exhaustively) {
  check_bytes_exhaustively<std::int8_t>(DType::kInt8);
  check_bytes_exhaustively<std::uint8_t>(DType::kUInt8);
}

TEST(wide_integers_wrap) {
  const auto low = std::numeric_limits<std::int64_t>::min();
  const auto high = std::numeric_limits<std::int64_t>::max();
  CHECK(reduce(DType::kInt64, ReduceOp::kSum, high, std::int64_t{1}) == low, "int64 sum");
  CHECK(reduce(DType::kInt64, ReduceOp::kProd, low, std::int64_t{-1}) == low, "int64 prod");
  CHECK(reduce<std::uint16_t>(DType::kUInt16, ReduceOp::kProd, 65535, 65535) == 1, "uint16 prod");
  CHECK(reduce<std::int32_t>(DType::kInt32, ReduceOp::kProd, 65536, 65537) == 65536, "int32 prod");
}

TEST(bools_are_or_and_and) {
  for (unsigned a = 0; a < 2; ++a) {
    for (unsigned b = 0; b < 2; ++b) {
      const unsigned expected[] = {a | b, a & b, a & b, a | b, a | b, a & b, a | b, a ^ b};
      for (std::size_t op = 0; op < std::size(expected); ++op) {
        const auto got =
            reduce<std::uint8_t>(DType::kBool, static_cast<ReduceOp>(op),
                                 static_cast<std::uint8_t>(a), static_cast<std::uint8_t>(b));
        CHECK(got == expected[op], "bool op %zu: %u, %u gives %u", op, a, b, got);
      }
    }
  }
}

TEST(folds_go_from_left_to_right) {
  const auto sum = combine<float>(DType::kFloat32, ReduceOp::kSum, Isa::kReference,
                                  {{1.0f}, {0x1p-24f}, {0x1p-24f}, {0x1p-24f}});
  CHECK(sum[0] == 1.0f, "sum is %.9g", sum[0]);
  const auto other = combine<float>(DType::kFloat32, ReduceOp::kSum, Isa::kReference,
                                    {{0x1p-24f}, {0x1p-24f}, {1.0f}});
  CHECK(other[0] == 1.0f + 0x1p-23f, "sum is %.9g", other[0]);
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
