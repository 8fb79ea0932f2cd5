#include "device/watch.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <utility>

namespace pycoll::device {
namespace {

static_assert(kStopMismatch == static_cast<std::uint32_t>(Code::kMismatch));
static_assert(kStopReduction == static_cast<std::uint32_t>(Code::kReduction));
static_assert(static_cast<std::uint32_t>(Code::kOk) == 0, "memory begins as zeros");

// Kernels write the words concurrently.
std::atomic_ref<std::uint32_t> shared(std::uint32_t& word) {
  return std::atomic_ref<std::uint32_t>(word);
}

std::string to_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

Watch::Watch(const Words& words, Clock& clock, Names names)
    : words_(words), clock_(clock), names_(std::move(names)), seen_(words.beats.size()) {}

std::string Watch::operation() const {
  return names_(shared(words_.control->label).load(std::memory_order_relaxed));
}

std::uint32_t Watch::stop() const {
  return shared(words_.control->stop).load(std::memory_order_acquire);
}

void Watch::tell(Code code) const {
  std::uint32_t running = 0;
  shared(words_.control->stop)
      .compare_exchange_strong(running, static_cast<std::uint32_t>(code), std::memory_order_release,
                               std::memory_order_relaxed);
}

bool Watch::look() {
  const Nanoseconds now = clock_.now();
  running_ = 0;
  for (std::size_t block = 0; block < seen_.size(); ++block) {
    Seen& seen = seen_[block];
    const std::uint32_t beat = shared(words_.beats[block]).load(std::memory_order_relaxed);
    if (beat != seen.beat) seen = {beat, now};
    if (beat % 2 != 0) running_ = std::max(running_, now - seen.since);
  }
  if (stop() != 0) return true;
  if (running_ < timeout_) return false;
  tell(Code::kTimeout);
  return true;
}

void Watch::give_up(Status reason) {
  if (!reason_.ok()) return;
  reason_ = std::move(reason);
  tell(reason_.code());
}

std::vector<int> Watch::waited_ranks() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < words_.waits.size(); ++rank) {
    if (shared(words_.waits[rank]).load(std::memory_order_relaxed) != 0) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

Status Watch::outcome() {
  const auto code = static_cast<Code>(stop());
  if (code == Code::kOk || (!reason_.ok() && code == reason_.code())) return reason_;
  const std::uint32_t odd = shared(words_.control->odd_peer).load(std::memory_order_relaxed);
  const int rank = static_cast<int>(odd) - 1;
  if (code == Code::kMismatch) {
    reason_ = Status::error(code,
                            operation() + ": rank " + std::to_string(rank) +
                                " is in another operation, or in this one with another size, "
                                "type, operation or algorithm; all ranks must call alike",
                            {rank});
    return reason_;
  }
  if (code == Code::kReduction) {
    // Later operations may have begun since, so the text names none.
    reason_ = Status::error(code,
                            "rank " + std::to_string(rank) +
                                " sent codes of an array on a device that do not decode: their "
                                "places do not ascend below the length of the array",
                            {rank});
    return reason_;
  }
  std::vector<int> ranks = waited_ranks();
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", static_cast<double>(timeout_) / 1e9);
  std::string message = operation() + ": not done after " + seconds + " s";
  if (!ranks.empty()) message += "; the device still waited for ranks " + to_text(ranks);
  reason_ = Status::error(code, std::move(message), std::move(ranks));
  return reason_;
}

}  // namespace pycoll::device
