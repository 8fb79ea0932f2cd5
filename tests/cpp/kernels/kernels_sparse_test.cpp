// Sparse codes and thin products: every instruction set gives the bits of the reference, and keeps
// to its buffers. The oracle is in NumPy (tests/kernels/test_sparse_codes.py).
#include <cmath>
#include <cstring>
#include <memory>

#include "base/prng.h"
#include "kernels/dispatch.h"
#include "kernels/sparse_codes.h"
#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using kernels::Isa;
using kernels::SparseCodes;
using kernels::SparseInput;
using kernels::SparseSpan;

// Memory of exactly this size, so that a sanitizer sees each access outside.
std::unique_ptr<float[]> drawn(Prng& prng, std::size_t count) {
  auto made = std::make_unique<float[]>(count);
  for (std::size_t i = 0; i < count; ++i) made[i] = static_cast<float>(prng.below(41)) - 20.0f;
  return made;
}

bool alike(const SparseCodes& a, const SparseCodes& b) {
  return a.places == b.places && a.values.size() == b.values.size() &&
         (a.values.empty() ||
          std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0);
}

TEST(every_instruction_set_chooses_alike) {
  Prng prng(7);
  for (std::size_t count : {0, 1, 31, 32, 33, 63, 100, 4097, 20000}) {
    const auto values = drawn(prng, count), rests = drawn(prng, count), sums = drawn(prng, count);
    for (const std::size_t number : {std::size_t{0}, std::size_t{1}, count / 3, count}) {
      const SparseInput input{values.get(), rests.get(), sums.get(), count};
      const SparseCodes largest = kernels::largest_values(input, number, Isa::kReference);
      const SparseCodes from = kernels::values_from(input, 12.0f, Isa::kReference);
      CHECK(largest.places.size() == std::min(number, count), "%zu of %zu", number, count);
      for (const Isa isa : testing::fast_isas()) {
        CHECK(alike(kernels::largest_values(input, number, isa), largest) &&
                  alike(kernels::values_from(input, 12.0f, isa), from),
              "%zu of %zu values, %s", number, count, kernels::name_of(isa).data());
      }
    }
  }
}

TEST(codes_are_folded_and_spread) {
  const std::uint32_t places[] = {1, 5000, 9999};
  const float values[] = {-0.0f, 2.0f, 3.0f};
  const SparseSpan codes{reinterpret_cast<const std::byte*>(places),
                         reinterpret_cast<const std::byte*>(values), 3};
  SparseCodes sum;
  CHECK(kernels::fold_codes({codes, codes}, 10000, 2, &sum), "places ascend");
  CHECK((sum.places == std::vector<std::uint32_t>{1, 5000, 9999}), "three places");
  CHECK((sum.values == std::vector<float>{0.0f, 2.0f, 3.0f}), "means");
  const auto target = std::make_unique<float[]>(10000);
  target[0] = 7.0f;
  CHECK(kernels::spread_codes(codes, target.get(), 10000), "places ascend");
  CHECK(target[0] == 0.0f && target[5000] == 2.0f && target[9999] == 3.0f, "spread");
}

// Whatever arrives, no access leaves the arrays.
TEST(places_from_elsewhere_stay_inside) {
  Prng prng(11);
  constexpr std::size_t kCount = 5000, kNumber = 8;
  for (int round = 0; round < 2000; ++round) {
    auto places = std::make_unique<std::uint32_t[]>(kNumber);
    const auto values = drawn(prng, kNumber);
    const auto target = std::make_unique<float[]>(kCount);
    bool ascend = true;
    for (std::size_t i = 0; i < kNumber; ++i) {
      const auto step = static_cast<std::uint32_t>(prng.below(round % 2 == 0 ? 700 : 1u << 31));
      places[i] = i == 0 ? step : places[i - 1] + step;
      ascend = ascend && places[i] < kCount && (i == 0 || places[i] > places[i - 1]);
    }
    const SparseSpan codes{reinterpret_cast<const std::byte*>(places.get()),
                           reinterpret_cast<const std::byte*>(values.get()), kNumber};
    SparseCodes sum;
    CHECK(kernels::spread_codes(codes, target.get(), kCount) == ascend, "round %d", round);
    CHECK(kernels::fold_codes({codes}, kCount, 0, &sum) == ascend, "round %d", round);
  }
}

TEST(every_instruction_set_multiplies_alike) {
  Prng prng(13);
  for (const std::size_t columns : {1, 15, 16, 40}) {
    constexpr std::size_t kRows = 5, kRank = 3;
    const std::size_t count = kRows * columns;
    const auto p = drawn(prng, kRows * kRank), q = drawn(prng, kRank * columns),
               base = drawn(prng, count);
    const float* const bases[] = {nullptr, base.get()};
    for (const float* from : bases) {
      const auto expected = std::make_unique<float[]>(count);
      kernels::product_for(Isa::kReference)(expected.get(), from, p.get(), q.get(), kRows, columns,
                                            kRank);
      for (const Isa isa : testing::fast_isas()) {
        const auto found = std::make_unique<float[]>(count);
        kernels::product_for(isa)(found.get(), from, p.get(), q.get(), kRows, columns, kRank);
        CHECK(std::memcmp(found.get(), expected.get(), count * sizeof(float)) == 0,
              "%zu columns, %s", columns, kernels::name_of(isa).data());
      }
    }
  }
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
