// Wire forms: those of every instruction set against the reference, and their rules.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/wire.h"
#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using kernels::Isa;
using kernels::WireForm;

__extension__ using Int128 = __int128;
__extension__ using UInt128 = unsigned __int128;

constexpr DType kSmallFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                                  DType::kFloat8E5M2};

// The fold of all ranks' elements, as an operation makes it.
std::vector<unsigned char> folded(const WireForm& form, DType dtype, std::size_t count,
                                  const std::vector<const void*>& ranks) {
  const std::size_t groups = count / form.array_items;
  const std::size_t bytes = groups * form.wire_items * item_bytes(form.dtype);
  const auto size = static_cast<std::uint32_t>(ranks.size());
  std::vector<unsigned char> sum(bytes);
  std::vector<unsigned char> next(bytes);
  form.enter(sum.data(), ranks[0], groups, size);
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    form.enter(next.data(), ranks[rank], groups, size);
    const void* both[] = {sum.data(), next.data()};
    form.combine.function(sum.data(), both, 2, groups * form.wire_items, nullptr);
  }
  std::vector<unsigned char> result(count * item_bytes(dtype));
  form.leave(result.data(), sum.data(), groups, size);
  return result;
}

template <typename T>
std::vector<T> reduce_ranks(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& ranks) {
  std::vector<const void*> memory;
  memory.reserve(ranks.size());
  for (const std::vector<T>& one : ranks) memory.push_back(one.data());
  const WireForm form = kernels::wire_form(dtype, op, Isa::kReference);
  CHECK(static_cast<bool>(form), "%s of %s has no wire form", name_of(op).data(),
        name_of(dtype).data());
  const std::vector<unsigned char> bytes = folded(form, dtype, ranks[0].size(), memory);
  std::vector<T> result(ranks[0].size());
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

TEST(every_instruction_set_gives_the_bits_of_the_reference) {
  Prng prng(11);
  for (const Isa isa : testing::fast_isas()) {
    for (const DType dtype : kSmallFloats) {
      for (const std::size_t count : {0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 65, 1000, 20011}) {
        const std::uint32_t size = 2 + static_cast<std::uint32_t>(prng.below(40));
        const std::size_t bytes = count * item_bytes(dtype);
        // Misaligned by one byte, and nothing behind the end.
        std::vector<std::vector<unsigned char>> data;
        std::vector<const void*> ranks;
        data.reserve(size);
        ranks.reserve(size);
        for (std::uint32_t rank = 0; rank < size; ++rank) {
          data.emplace_back(bytes + 1);
          testing::fill_random(prng, dtype, data.back().data() + 1, count);
        }
        for (const auto& one : data) ranks.push_back(one.data() + 1);
        const auto expected =
            folded(kernels::wire_form(dtype, ReduceOp::kAvg, Isa::kReference), dtype, count, ranks);
        const auto got =
            folded(kernels::wire_form(dtype, ReduceOp::kAvg, isa), dtype, count, ranks);
        for (std::size_t at = 0; at < bytes; ++at) {
          CHECK(got[at] == expected[at], "%s of %zu on %s, %u ranks: byte %zu is %x, expected %x",
                name_of(dtype).data(), count, kernels::name_of(isa).data(), size, at, got[at],
                expected[at]);
        }
      }
    }
  }
}

// Every number of a small float, on all ranks: the mean is that number, subnormals and all.
TEST(the_mean_of_equal_numbers_is_that_number) {
  for (const Isa isa : testing::fast_isas()) {
    for (const DType dtype : kSmallFloats) {
      const std::size_t patterns = std::size_t{1} << 8 * item_bytes(dtype);
      std::vector<std::uint16_t> words(patterns);
      std::vector<std::uint8_t> octets(patterns);
      for (std::size_t i = 0; i < patterns; ++i) {
        words[i] = static_cast<std::uint16_t>(i);
        octets[i] = static_cast<std::uint8_t>(i);
      }
      const bool is_byte = item_bytes(dtype) == 1;
      const auto* data = is_byte ? octets.data() : reinterpret_cast<unsigned char*>(words.data());
      const auto layout = testing::layout_of(dtype);
      const std::size_t sign = patterns / 2;
      const std::size_t infinity = (sign - 1) >> layout.mantissa_bits << layout.mantissa_bits;
      const std::size_t nan_from = dtype == DType::kFloat8E4M3 ? 0x7f : infinity + 1;
      for (const std::size_t size : {2, 3, 5, 7, 8, 33, 1000}) {
        const std::vector<const void*> ranks(size, data);
        const auto got =
            folded(kernels::wire_form(dtype, ReduceOp::kAvg, isa), dtype, patterns, ranks);
        for (std::size_t i = 0; i < patterns; ++i) {
          if ((i & (sign - 1)) >= nan_from) continue;
          const std::size_t item = item_bytes(dtype);
          CHECK(std::memcmp(got.data() + i * item, data + i * item, item) == 0,
                "%s 0x%zx on %zu ranks, %s", name_of(dtype).data(), i, size,
                kernels::name_of(isa).data());
        }
      }
    }
  }
}

TEST(means_of_integers_are_exact_and_round_towards_zero) {
  CHECK(reduce_ranks<std::uint8_t>(DType::kUInt8, ReduceOp::kAvg, {{200, 255}, {200, 254}}) ==
            (std::vector<std::uint8_t>{200, 254}),
        "uint8");
  const std::vector<std::int8_t> low{-128, -7, 7, 127};
  CHECK(reduce_ranks<std::int8_t>(DType::kInt8, ReduceOp::kAvg, {low, {-128, 0, 0, 126}}) ==
            (std::vector<std::int8_t>{-128, -3, 3, 126}),
        "int8");
  Prng prng(5);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t size = 2 + prng.below(40);
    std::vector<std::vector<std::int64_t>> signed_ranks(size);
    std::vector<std::vector<std::uint64_t>> ranks(size);
    Int128 signed_sum = 0;
    UInt128 sum = 0;
    for (std::size_t rank = 0; rank < size; ++rank) {
      const std::uint64_t word =
          prng.chance(1, 3) ? (prng.chance(1, 2) ? std::uint64_t{1} << 63 : ~std::uint64_t{0} >> 1)
                            : prng.next() >> prng.below(64);
      const std::uint64_t value = prng.chance(1, 2) ? word : 0 - word;
      ranks[rank] = {value};
      signed_ranks[rank] = {static_cast<std::int64_t>(value)};
      signed_sum += static_cast<std::int64_t>(value);
      sum += value;
    }
    const auto by = static_cast<Int128>(size);
    CHECK(reduce_ranks(DType::kInt64, ReduceOp::kAvg, signed_ranks)[0] ==
              static_cast<std::int64_t>(signed_sum / by),
          "int64, round %d", round);
    CHECK(reduce_ranks(DType::kUInt64, ReduceOp::kAvg, ranks)[0] ==
              static_cast<std::uint64_t>(sum / static_cast<UInt128>(size)),
          "uint64, round %d", round);
  }
}

TEST(logical_reductions_give_one_and_zero) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> ranks{{0, -0.0f, 3, nan}, {0, 2, 0.5f, -1}};
  CHECK(reduce_ranks(DType::kFloat32, ReduceOp::kLand, ranks) == (std::vector<float>{0, 0, 1, 1}),
        "land");
  CHECK(reduce_ranks(DType::kFloat32, ReduceOp::kLor, ranks) == (std::vector<float>{0, 1, 1, 1}),
        "lor");
  CHECK(reduce_ranks(DType::kFloat32, ReduceOp::kLxor, ranks) == (std::vector<float>{0, 1, 0, 0}),
        "lxor");
  for (const DType dtype : testing::all_dtypes()) {
    for (const ReduceOp op : {ReduceOp::kLand, ReduceOp::kLor, ReduceOp::kLxor}) {
      CHECK(static_cast<bool>(kernels::wire_form(dtype, op, Isa::kReference)), "%s of %s",
            name_of(op).data(), name_of(dtype).data());
    }
  }
}

TEST(locations_take_the_lowest_place_of_the_best_value) {
  const std::vector<std::vector<double>> ranks{{5, 9, 1, 4}, {5, 2, -0.0, 7}, {4, 0, 0, 6}};
  CHECK(
      reduce_ranks(DType::kFloat64, ReduceOp::kMaxloc, ranks) == (std::vector<double>{5, 2, 1, 4}),
      "maxloc");
  CHECK(
      reduce_ranks(DType::kFloat64, ReduceOp::kMinloc, ranks) == (std::vector<double>{4, 0, 0, 6}),
      "minloc");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::vector<double>> odd{{1, 0}, {nan, 3}, {nan, 2}};
  for (const ReduceOp op : {ReduceOp::kMaxloc, ReduceOp::kMinloc}) {
    const std::vector<double> found = reduce_ranks(DType::kFloat64, op, odd);
    CHECK(std::isnan(found[0]) && found[1] == 2, "%s gives (%g, %g)", name_of(op).data(), found[0],
          found[1]);
  }
  const std::uint64_t top = std::numeric_limits<std::uint64_t>::max();
  CHECK(
      reduce_ranks<std::uint64_t>(DType::kUInt64, ReduceOp::kMaxloc, {{top - 1, 0}, {top, top}}) ==
          (std::vector<std::uint64_t>{top, top}),
      "uint64");
}

// Whatever comes first, and however the fold is cut.
TEST(pairs_that_enter_come_back) {
  Prng prng(3);
  for (const DType dtype : testing::all_dtypes()) {
    const WireForm form = kernels::wire_form(dtype, ReduceOp::kMaxloc, Isa::kReference);
    CHECK(static_cast<bool>(form) == kernels::defined(dtype, ReduceOp::kMaxloc), "%s",
          name_of(dtype).data());
    if (!form) continue;
    const std::size_t item = item_bytes(dtype);
    std::vector<unsigned char> pairs(2000 * item);
    testing::fill_random(prng, dtype, pairs.data(), 2000);
    std::vector<unsigned char> wire(1000 * 16);
    std::vector<unsigned char> back(pairs.size());
    std::vector<unsigned char> again(pairs.size());
    form.enter(wire.data(), pairs.data(), 1000, 2);
    form.leave(back.data(), wire.data(), 1000, 2);
    form.enter(wire.data(), back.data(), 1000, 2);
    form.leave(again.data(), wire.data(), 1000, 2);
    CHECK(back == again, "%s: not canonical", name_of(dtype).data());
    std::size_t changed = 0;  // of zeros and NaN alone
    for (std::size_t i = 0; i < 2000; ++i) {
      changed += std::memcmp(&back[i * item], &pairs[i * item], item) != 0 ? 1 : 0;
    }
    const bool is_integer = testing::layout_of(dtype).mantissa_bits == 0;
    CHECK(is_integer ? changed == 0 : changed < 1200, "%s: %zu changed", name_of(dtype).data(),
          changed);
  }
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
