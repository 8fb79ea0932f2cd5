#include "engine/diagnosis/dispute.h"

#include <algorithm>
#include <limits>

namespace pycoll::engine {
namespace {

using executor::CallArrays;
using transport::Dispute;

constexpr std::uint32_t kNowhere = std::numeric_limits<std::uint32_t>::max();

void write_digests(const CallArrays* arrays, Dispute* dispute) {
  std::fill(std::begin(dispute->digests), std::end(dispute->digests), 0);
  if (arrays == nullptr) return;
  std::size_t begin = dispute->begin;
  for (std::uint32_t& digest : dispute->digests) {
    if (dispute->width != 0) digest = arrays->digest(begin, begin + dispute->width);
    begin += dispute->width;
  }
}

}  // namespace

Dispute open_dispute(std::uint64_t operation, const CallArrays* arrays) {
  Dispute dispute;
  dispute.operation = operation;
  dispute.arrays = arrays == nullptr ? 0 : static_cast<std::uint32_t>(arrays->size());
  dispute.width = kNowhere;
  write_digests(arrays, &dispute);
  return dispute;
}

Dispute next_round(const std::vector<Dispute>& all) {
  const Dispute& first = all.front();
  std::uint32_t most = 0;
  for (const Dispute& one : all) most = std::max(most, one.arrays);
  for (std::uint32_t part = 0; part < Dispute::kDigests; ++part) {
    const bool equal = std::all_of(all.begin(), all.end(), [&](const Dispute& one) {
      return one.digests[part] == first.digests[part];
    });
    if (equal) continue;
    Dispute next;
    next.round = first.round + 1;
    const std::uint64_t begin = first.begin + std::uint64_t{first.width} * part;
    if (begin >= most) break;
    next.begin = static_cast<std::uint32_t>(begin);
    const std::uint32_t rest = std::min(first.width, most - next.begin);
    next.width = first.width == 1 ? 0 : (rest - 1) / Dispute::kDigests + 1;
    return next;
  }
  return end_search(first);
}

bool in_step(const Dispute& one, const Dispute& other) {
  return one.round == other.round && one.begin == other.begin && one.width == other.width;
}

bool found_equal(const Dispute& dispute) {
  return dispute.operation != 0 && dispute.width == 0 && dispute.begin == kNowhere;
}

void enter_round(const Dispute& to, const CallArrays* arrays, Dispute* dispute) {
  dispute->round = to.round;
  dispute->begin = to.begin;
  dispute->width = to.width;
  write_digests(arrays, dispute);
}

Dispute end_search(const Dispute& dispute) {
  Dispute next;
  next.round = dispute.round + 1;
  next.begin = kNowhere;
  return next;
}

}  // namespace pycoll::engine
