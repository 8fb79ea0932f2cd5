// The search for the first array in which the calls of ranks differ.
#include "engine/diagnosis/dispute.h"

#include <algorithm>
#include <string>

#include "base/prng.h"
#include "tests/cpp/support/check.h"

using namespace pycoll;
using namespace pycoll::engine;
using executor::CallArrays;
using transport::Dispute;

namespace {

constexpr std::size_t kMost = 87;

CallArrays arrays_of(std::size_t count, std::size_t odd) {
  CallArrays arrays;
  for (std::size_t index = 0; index < count; ++index) {
    const std::int64_t lengths[] = {2, index == odd ? 9 : 3};
    arrays.add(DType::kFloat32, ReduceOp::kSum, 2, lengths);
  }
  return arrays;
}

struct Found {
  std::uint32_t index;
  std::uint32_t rounds;
  bool equal;
};

// Runs the search of ranks that hear each other at once.
Found search(const std::vector<CallArrays>& ranks) {
  std::vector<Dispute> all;
  for (const CallArrays& one : ranks) all.push_back(open_dispute(5, &one));
  while (all.front().width != 0) {
    const Dispute next = next_round(all);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      enter_round(next, &ranks[rank], &all[rank]);
      CHECK(in_step(all[rank], next), "rank %zu is in another round", rank);
    }
    CHECK(all.front().round < 20, "no end");
  }
  return {all.front().begin, all.front().round, found_equal(all.front())};
}

}  // namespace

TEST(the_only_array_that_differs_is_found) {
  for (const std::size_t count : {1, 2, 9, 10, 11, 99, 100, 101, 1000, 54'321}) {
    for (const std::size_t odd : {std::size_t{0}, count / 3, count / 2, count - 1}) {
      const Found found = search({arrays_of(count, count), arrays_of(count, odd)});
      CHECK(!found.equal && found.index == odd, "array %zu of %zu, found %u", odd, count,
            found.index);
      CHECK(found.rounds <= 7, "%u rounds for %zu arrays", found.rounds, count);
    }
  }
}

TEST(the_first_of_many_differences_is_found) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Prng random(seed);
    const std::size_t count = 1 + random.below(300);
    std::vector<std::size_t> odd{random.below(count), random.below(count), random.below(count)};
    std::vector<CallArrays> ranks{arrays_of(count, count)};
    for (const std::size_t one : odd) ranks.push_back(arrays_of(count, one));
    const Found found = search(ranks);
    const std::size_t first = *std::min_element(odd.begin(), odd.end());
    CHECK(found.index == first, "seed %llu: %u", static_cast<unsigned long long>(seed),
          found.index);
  }
}

TEST(a_shorter_list_differs_behind_its_end) {
  const Found found = search({arrays_of(30, 30), arrays_of(31, 31)});
  CHECK(!found.equal && found.index == 30, "%u", found.index);
  const Found empty = search({arrays_of(30, 30), CallArrays()});
  CHECK(!empty.equal && empty.index == 0, "%u", empty.index);
}

TEST(equal_lists_have_no_difference) {
  CHECK(search({arrays_of(30, 7), arrays_of(30, 7), arrays_of(30, 7)}).equal, "30 arrays");
  CHECK(search({CallArrays(), CallArrays()}).equal, "no array");
}

TEST(arrays_have_texts) {
  CallArrays arrays;
  const std::int64_t lengths[] = {3, 2};
  arrays.add(DType::kFloat64, ReduceOp::kMax, 2, lengths);
  const auto expect = [&](std::size_t index, const std::string& text) {
    CHECK(arrays.text(index, kMost) == text, "%s", arrays.text(index, kMost).c_str());
  };
  expect(0, "shape (3, 2)");
  expect(1, "1 array, no arrays[1]");
  arrays.add(DType::kInt8, ReduceOp::kSum, 1, lengths);
  arrays.add(DType::kInt8, ReduceOp::kSum, 0, nullptr);
  expect(0, "arrays[0] of 3: float64, op max, shape (3, 2)");
  expect(1, "arrays[1] of 3: int8, op sum, shape (3,)");
  expect(2, "arrays[2] of 3: int8, op sum, shape ()");
  expect(3, "3 arrays, no arrays[3]");
  CHECK(arrays.text(0, 20) == "arrays[0] of 3: f...", "%s", arrays.text(0, 20).c_str());
}

TEST(keys_depend_on_all_properties) {
  const std::int64_t lengths[] = {3, 2};
  std::vector<std::uint64_t> keys;
  const auto add = [&](DType dtype, ReduceOp op, int axes, int times) {
    CallArrays arrays;
    for (int time = 0; time < times; ++time) arrays.add(dtype, op, axes, lengths);
    keys.push_back(arrays.key());
  };
  add(DType::kInt8, ReduceOp::kSum, 2, 1);
  add(DType::kInt16, ReduceOp::kSum, 2, 1);
  add(DType::kInt8, ReduceOp::kMax, 2, 1);
  add(DType::kInt8, ReduceOp::kSum, 1, 1);
  add(DType::kInt8, ReduceOp::kSum, 0, 1);
  add(DType::kInt8, ReduceOp::kSum, 2, 2);
  std::sort(keys.begin(), keys.end());
  CHECK(std::adjacent_find(keys.begin(), keys.end()) == keys.end(), "two keys are equal");
}

RUN_TESTS()
