// Rows of tables: searches end, sums are those of every instruction set, and nothing is touched
// outside. The oracle is in NumPy (tests/kernels/test_row_kernels.py).
#include <cstring>
#include <memory>
#include <vector>

#include "base/prng.h"
#include "kernels/stored_rows.h"
#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using kernels::Isa;

template <typename T>
const std::byte* bytes_of(const std::vector<T>& numbers) {
  return reinterpret_cast<const std::byte*>(numbers.data());
}

template <typename T>
std::byte* bytes_of(std::vector<T>& numbers) {
  return reinterpret_cast<std::byte*>(numbers.data());
}

TEST(each_id_has_one_place) {
  Prng prng(3);
  for (const std::size_t count : {0, 1, 63, 64, 65, 1000}) {
    std::vector<std::int64_t> slots(2048, -1);
    std::vector<std::int64_t> ids(count + 1), wanted(count), places(count);
    for (std::int64_t& one : wanted) one = static_cast<std::int64_t>(prng.below(count + 1));
    kernels::RowIndex index{slots.data(), slots.size(), ids.data(), 0};
    CHECK(kernels::find_rows(index, bytes_of(wanted), count, bytes_of(places)) == count, "unknown");
    kernels::add_ids(&index, bytes_of(wanted), count, bytes_of(places));
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(ids[static_cast<std::size_t>(places[i])] == wanted[i], "the place of its id");
    }
    std::vector<std::int64_t> again(slots.size(), -1);
    kernels::fill_slots({again.data(), again.size(), ids.data(), index.count});
    const kernels::RowIndex other{again.data(), again.size(), ids.data(), index.count};
    std::vector<std::int64_t> found(count);
    CHECK(kernels::find_rows(other, bytes_of(wanted), count, bytes_of(found)) == 0, "all known");
    CHECK(found == places, "the same places in other slots");
  }
}

TEST(every_instruction_set_adds_rows_alike) {
  Prng prng(4);
  for (const std::size_t dim : {1, 5, 64, 100}) {
    const std::vector<std::int64_t> places = {2, -1, 0, 2, 2};
    std::vector<float> source(places.size() * dim), rows(3 * dim);
    for (float& one : source) one = static_cast<float>(prng.below(1000)) / 7.0f;
    for (float& one : rows) one = static_cast<float>(prng.below(1000)) / 3.0f;
    std::vector<float> added = rows, summed(3 * dim, 1.0f);
    kernels::add_rows(bytes_of(added), DType::kFloat32, dim, bytes_of(places), places.size(),
                      bytes_of(source), Isa::kReference);
    kernels::sum_rows(bytes_of(summed), 3, DType::kFloat32, dim, bytes_of(places), places.size(),
                      bytes_of(source), Isa::kReference);
    for (std::size_t i = 0; i < dim; ++i) {
      CHECK(added[dim + i] == rows[dim + i] && summed[dim + i] == 1.0f, "row 1 has no place");
      CHECK(summed[i] == source[2 * dim + i], "one row is copied");
      CHECK(summed[2 * dim + i] == source[i] + source[3 * dim + i] + source[4 * dim + i], "a sum");
    }
    for (const Isa isa : testing::fast_isas()) {
      std::vector<float> other = rows, total(3 * dim, 1.0f);
      kernels::add_rows(bytes_of(other), DType::kFloat32, dim, bytes_of(places), places.size(),
                        bytes_of(source), isa);
      kernels::sum_rows(bytes_of(total), 3, DType::kFloat32, dim, bytes_of(places), places.size(),
                        bytes_of(source), isa);
      CHECK(other == added && total == summed, "dim %zu, %s", dim, kernels::name_of(isa).data());
    }
  }
}

TEST(frequent_ids_stay_counted) {
  std::vector<std::int64_t> ids(64), counts(64, 0), given;
  Prng prng(5);
  for (int turn = 0; turn < 2000; ++turn) {
    given.push_back(turn % 2 == 0 ? 7 : static_cast<std::int64_t>(prng.below(1u << 30)));
  }
  kernels::count_ids({ids.data(), counts.data(), ids.size(), 16}, bytes_of(given), given.size());
  std::int64_t found = 0;
  std::size_t used = 0;
  for (std::size_t at = 0; at < ids.size(); ++at) {
    used += counts[at] != 0 ? 1 : 0;
    if (counts[at] != 0 && ids[at] == 7) found = counts[at];
  }
  CHECK(found <= 1000 && found >= 1000 - 2000 / 16 && used < 32, "%zu are counted", used);
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
