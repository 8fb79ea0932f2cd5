// All_reduces whose memory is several arrays on one rank and one on the others: ranks cannot tell.
#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "tests/cpp/engine/engine_ranks.h"

using namespace pycoll;
using namespace pycoll::testing;

namespace {

// Segments have 8192 elements: arrays end inside, at the end of, and many within one.
constexpr std::array<std::size_t, 8> kLengths = {1, 8191, 16384, 3, 5, 20000, 8192, 1000};

// An array each, of which every other one is reduced in place.
struct Pieces {
  explicit Pieces(const std::vector<Element>& whole) {
    std::size_t begin = 0;
    for (const std::size_t length : kLengths) {
      const auto from = whole.begin() + static_cast<std::ptrdiff_t>(begin);
      inputs.emplace_back(from, from + static_cast<std::ptrdiff_t>(length));
      outputs.emplace_back(length);
      begin += length;
    }
  }

  std::vector<executor::Part> parts() {
    std::vector<executor::Part> made;
    std::uint64_t end = 0;
    for (std::size_t piece = 0; piece < inputs.size(); ++piece) {
      auto* input = reinterpret_cast<std::byte*>(inputs[piece].data());
      auto* output = reinterpret_cast<std::byte*>(outputs[piece].data());
      end += inputs[piece].size() * sizeof(Element);
      made.push_back({input, piece % 2 == 0 ? input : output, end});
    }
    return made;
  }

  std::vector<Element> result() const {
    std::vector<Element> all;
    for (std::size_t piece = 0; piece < inputs.size(); ++piece) {
      const auto& found = piece % 2 == 0 ? inputs[piece] : outputs[piece];
      all.insert(all.end(), found.begin(), found.end());
    }
    return all;
  }

  std::vector<std::vector<Element>> inputs, outputs;
};

void reduce(int size, PlanImage (*plan)(int, int)) {
  const std::size_t count = std::accumulate(kLengths.begin(), kLengths.end(), std::size_t{0});
  std::vector<std::vector<Element>> data;
  std::vector<Element> wanted(count);
  for (int rank = 0; rank < size; ++rank) {
    auto& own = data.emplace_back(count);
    std::iota(own.begin(), own.end(), Element{1'000'000} * static_cast<Element>(rank + 1));
    for (std::size_t i = 0; i < count; ++i) wanted[i] += own[i];
  }
  Pieces pieces(data[1]);
  Ranks ranks(size);
  std::vector<std::shared_ptr<Operation>> operations;
  for (int rank = 0; rank < size; ++rank) {
    auto& own = data[static_cast<std::size_t>(rank)];
    executor::CollectiveRequest request = all_reduce(plan(size, rank), own, own);
    if (rank == 1) {
      request.parts = pieces.parts();
      request.input.data = request.parts.front().input;
      request.output.data = request.parts.front().output;
    }
    operations.push_back(ranks.at(rank).start(std::move(request), 10 * kSecond));
  }
  ranks.run_until(kSecond);
  for (const auto& operation : operations) {
    CHECK(operation->done() && operation->status().ok(), "%s",
          operation->status().message().c_str());
  }
  data[1] = pieces.result();
  for (int rank = 0; rank < size; ++rank) {
    const auto& found = data[static_cast<std::size_t>(rank)];
    const auto [right, wrong] = std::mismatch(wanted.begin(), wanted.end(), found.begin());
    CHECK(right == wanted.end(), "size %d, rank %d, element %td", size, rank,
          right - wanted.begin());
  }
}

}  // namespace

TEST(several_arrays_are_reduced_as_one_by_a_direct_exchange) {
  for (const int size : {2, 3, 4}) reduce(size, direct_plan);
}

TEST(several_arrays_are_reduced_as_one_by_a_ring) {
  for (const int size : {2, 3, 4}) reduce(size, ring_plan);
}

RUN_TESTS()
