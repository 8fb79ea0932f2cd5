#include "device/registered_arrays.h"

#include <atomic>
#include <cstddef>
#include <utility>

namespace pycoll::device {

RegisteredArrays::RegisteredArrays(std::shared_ptr<const Gpu> gpu, const Parts& parts,
                                   const Words& words, Last last)
    : gpu_(std::move(gpu)),
      watch_thread_(parts.watch_thread),
      marks_(parts.marks),
      words_(words),
      last_(std::move(last)),
      registry_(gpu_, parts.channels, parts.membership.rank, parts.membership.size,
                parts.membership.names) {}

Status RegisteredArrays::enter(const Exchange& exchange, const std::vector<Registry::Array>& arrays,
                               std::vector<Registry::Entered>* entered) {
  if (watch_thread_.has_failed()) return watch_thread_.failure();
  const Gpu::Current current(*gpu_);
  if (!current.status().ok()) return current.status();
  return registry_.enter(
      exchange, arrays, [this](std::uint32_t number) { return is_quiet_since(number); }, entered);
}

// Kernels read the table when they begin, so running kernels may know the number. The lock also
// covers the registry's part: is_quiet_since() must not see the number lapsed before its launches.
Status RegisteredArrays::lapse(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(lapsing_);
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  if (status.ok()) status = registry_.lapse(number);
  Lapsed& one = lapsed_[number];
  one.behind = last_();
  one.beats.clear();
  for (const std::uint32_t& beat : words_.beats) {
    one.beats.push_back(std::atomic_ref(const_cast<std::uint32_t&>(beat)).load());
  }
  return status;
}

// Requires: the number has lapsed.
bool RegisteredArrays::is_quiet_since(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(lapsing_);
  const Lapsed& one = lapsed_[number];
  // After a failure elsewhere, kernels of a peer may run that do not know of the lapse.
  const Code code = watch_thread_.failure().code();
  if (code != Code::kOk && code != Code::kClosed) return false;
  bool is_past = true;
  if (one.behind != nullptr) (void)marks_.check_passed(*one.behind, &is_past);
  if (!is_past) return false;
  for (std::size_t block = 0; block < one.beats.size(); ++block) {
    const bool ran = one.beats[block] % 2 != 0;
    const std::uint32_t now = std::atomic_ref(words_.beats[block]).load();
    if (ran && now == one.beats[block]) return false;
  }
  return true;
}

std::vector<std::uint32_t> RegisteredArrays::let_go() {
  const Gpu::Current current(*gpu_);
  return registry_.let_go([this](std::uint32_t number) { return is_quiet_since(number); });
}

}  // namespace pycoll::device
