#include "plan/direct_writes.h"

#include <algorithm>

namespace pycoll::plan {

DirectWrites direct_writes_of(const Plan& plan) {
  DirectWrites made;
  std::vector<std::uint32_t> counts(plan.channels.size(), 0);
  made.window_uses.assign(plan.channels.size(), 0);
  made.announced.assign(plan.channels.size(), false);
  made.uses.assign(plan.rows.size() * kSendMax, kWindowUses);
  for (std::size_t index = 0; index < plan.rows.size(); ++index) {
    const Row& row = plan.rows[index];
    const bool is_direct = (row.flags & kFlagDirectWrite) != 0;
    const bool announces = (row.flags & kFlagAnnounceWindow) != 0;
    for (std::uint32_t i = 0; i < row.recv_count; ++i) {
      const std::uint32_t use = counts[row.recv[i]]++;
      if (announces) made.announced[row.recv[i]] = true;
      if (is_direct && use < kWindowUses) made.window_uses[row.recv[i]] |= std::uint64_t{1} << use;
    }
    for (std::uint32_t i = 0; i < row.send_count; ++i) {
      made.uses[index * kSendMax + i] =
          static_cast<std::uint8_t>(std::min<std::uint32_t>(counts[row.send[i]]++, kWindowUses));
    }
  }
  return made;
}

}  // namespace pycoll::plan
