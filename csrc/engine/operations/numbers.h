// Sequence numbers of operations, and sets of them.
//
// The upper bits of a number count calls, the lower bits the parts of a call. A list that travels
// as several messages is one call; every other collective is a call of its own. All ranks number
// calls alike, even if a refused call has another number of parts on the rank that refuses it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "transport/transport.h"

namespace pycoll::engine {

using transport::Numbers;

inline constexpr int kPartBits = 12;
inline constexpr std::uint64_t kPartsMask = (std::uint64_t{1} << kPartBits) - 1;

// The number of the call, from 1; 0: no operation.
constexpr std::uint64_t call_of(std::uint64_t number) { return number >> kPartBits; }
// The first number of the call after the one of `number`.
constexpr std::uint64_t next_call(std::uint64_t number) { return (number | kPartsMask) + 1; }

// The count of operations on the device stream after a replayable one; see count_on_stream().
inline constexpr std::uint64_t kUncounted = ~std::uint64_t{0};

// A set of numbers, as ascending ranges. One thread at a time.
class NumberSet {
 public:
  void add(Numbers numbers) {
    const auto behind = std::find_if(ranges_.rbegin(), ranges_.rend(), [&](const Numbers& one) {
                          return one.first <= numbers.first;
                        }).base();
    auto at = ranges_.insert(behind, numbers);
    if (at != ranges_.begin()) --at;
    while (at + 1 != ranges_.end()) merge_or_step(at);
    // Beyond this limit the two oldest ranges become one,
    // which then also contains the numbers between them.
    if (ranges_.size() > kRangesMax) {
      ranges_[1].first = ranges_[0].first;
      ranges_.erase(ranges_.begin());
    }
  }

  bool contains(std::uint64_t number) const {
    return std::any_of(ranges_.rbegin(), ranges_.rend(),
                       [number](const Numbers& one) { return one.contains(number); });
  }

 private:
  static constexpr std::size_t kRangesMax = 4096;
  using Iterator = std::vector<Numbers>::iterator;

  void merge_or_step(Iterator& at) {
    const auto next = at + 1;
    if (next->first > at->last + 1) {
      ++at;
      return;
    }
    at->last = std::max(at->last, next->last);
    at = ranges_.erase(next) - 1;
  }

  std::vector<Numbers> ranges_;
};

}  // namespace pycoll::engine
