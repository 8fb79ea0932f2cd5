#include "engine/waiting/cpu_balancer.h"

#include <algorithm>
#include <utility>

#include "base/cores.h"

namespace pycoll::engine {

int less_loaded_core(const std::vector<int>& cores, int rank, const std::vector<int>& usable) {
  const int own = cores[static_cast<std::size_t>(rank)];
  const auto higher = cores.begin() + rank + 1;
  if (own < 0 || std::find(higher, cores.end(), own) != cores.end()) return -1;
  const auto ranks_on = [&cores](int core) { return std::count(cores.begin(), cores.end(), core); };
  std::vector<int> by_load = usable;  // the emptiest core first
  std::stable_sort(by_load.begin(), by_load.end(),
                   [&](int one, int other) { return ranks_on(one) < ranks_on(other); });
  const auto place = std::find(by_load.rbegin(), by_load.rend(), own);
  if (place == by_load.rend()) return -1;
  const int better = by_load[static_cast<std::size_t>(place - by_load.rbegin())];
  return ranks_on(better) + 2 <= ranks_on(own) ? better : -1;
}

CpuBalancer::CpuBalancer(int rank, int size, int cores, std::vector<transport::CoreHints*> media)
    : rank_(rank),
      usable_(cores),
      media_(std::move(media)),
      cores_(static_cast<std::size_t>(size), -1) {}

void CpuBalancer::share_cores() {
  for (transport::CoreHints* medium : media_) medium->share_cores();
}

int CpuBalancer::better_core(Clock& clock) {
  const int own = current_core();
  for (transport::CoreHints* medium : media_) medium->tell_core(own);
  if (++waits_ % kWaitsPerLook != 0) return -1;
  look(own);
  if (!is_oversubscribed(own)) return -1;
  const int better = less_loaded_core(cores_, rank_, usable_core_numbers());
  if (better < 0) return -1;
  const Nanoseconds now = clock.now();
  if (now < next_) return -1;
  next_ = now + kPause;
  return better;
}

void CpuBalancer::look(int own) {
  for (std::size_t peer = 0; peer < cores_.size(); ++peer) {
    cores_[peer] = -1;
    for (transport::CoreHints* medium : media_) {
      cores_[peer] = std::max(cores_[peer], medium->core_of(static_cast<int>(peer)));
    }
  }
  cores_[static_cast<std::size_t>(rank_)] = own;
}

// Whether `own` runs more ranks than its even share.
bool CpuBalancer::is_oversubscribed(int own) const {
  const auto away = std::count(cores_.begin(), cores_.end(), -1);
  const auto known = static_cast<std::ptrdiff_t>(cores_.size()) - away;
  return (std::count(cores_.begin(), cores_.end(), own) - 1) * usable_ >= known;
}

}  // namespace pycoll::engine
