#include "plan/leading_rows.h"

#include <algorithm>

namespace pycoll::plan {
namespace {

bool only_sends_input(const Row& row) {
  return row.recv_count == 0 && row.send_count > 0 && row.carry == 0 &&
         static_cast<Buffer>(row.source) == Buffer::kInput &&
         static_cast<Buffer>(row.target) == Buffer::kNone;
}

bool shares_channel(const Row& a, const Row& b) {
  return std::any_of(a.send, a.send + a.send_count, [&](std::uint16_t channel) {
    return std::find(b.send, b.send + b.send_count, channel) != b.send + b.send_count;
  });
}

std::uint32_t count_leading_rows(std::span<const Row> lane) {
  const auto end = std::find_if_not(lane.begin(), lane.end(), only_sends_input);
  if (end == lane.end()) return 0;
  const bool shared = std::any_of(lane.begin(), end, [&](const Row& leading) {
    return std::any_of(end, lane.end(),
                       [&](const Row& row) { return shares_channel(leading, row); });
  });
  return shared ? 0 : static_cast<std::uint32_t>(end - lane.begin());
}

}  // namespace

std::vector<std::uint32_t> count_leading_rows(const Plan& plan) {
  std::vector<std::uint32_t> counts;
  auto begin = plan.rows.begin();
  for (std::uint32_t lane = 0; lane < plan.header->lane_count; ++lane) {
    const auto end =
        std::find_if(begin, plan.rows.end(), [lane](const Row& row) { return row.lane != lane; });
    counts.push_back(count_leading_rows(std::span<const Row>(begin, end)));
    begin = end;
  }
  return counts;
}

}  // namespace pycoll::plan
