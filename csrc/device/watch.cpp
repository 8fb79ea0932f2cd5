#include "device/watch.h"

#include <atomic>
#include <cstdio>
#include <utility>

namespace pycoll::device {
namespace {

static_assert(kStopMismatch == static_cast<std::uint32_t>(Code::kMismatch));
static_assert(static_cast<std::uint32_t>(Code::kOk) == 0, "memory begins as zeros");

// Kernels write there too.
std::atomic_ref<std::uint32_t> shared(std::uint32_t& word) {
  return std::atomic_ref<std::uint32_t>(word);
}

std::string to_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

Watch::Watch(Control* control, std::uint32_t* awaited, std::uint32_t size, Clock& clock)
    : control_(control), awaited_(awaited), size_(size), clock_(clock) {}

void Watch::begin(std::string operation, Nanoseconds timeout) {
  operation_ = std::move(operation);
  timeout_ = timeout;
  deadline_ = later(clock_.now(), timeout);
}

std::uint32_t Watch::stop() const { return shared(control_->stop).load(std::memory_order_acquire); }

void Watch::tell(Code code) {
  std::uint32_t running = 0;
  shared(control_->stop)
      .compare_exchange_strong(running, static_cast<std::uint32_t>(code), std::memory_order_release,
                               std::memory_order_relaxed);
}

bool Watch::look() {
  if (stop() != 0) return true;
  if (clock_.now() < deadline_) return false;
  tell(Code::kTimeout);
  return true;
}

void Watch::give_up(Status reason) {
  if (!reason_.ok()) return;
  reason_ = std::move(reason);
  tell(reason_.code());
}

std::vector<int> Watch::awaited_ranks() const {
  std::vector<int> ranks;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (shared(awaited_[rank]).load(std::memory_order_relaxed) != 0) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

Status Watch::outcome() {
  const auto code = static_cast<Code>(stop());
  if (code == Code::kOk || (!reason_.ok() && code == reason_.code())) return reason_;
  if (code == Code::kMismatch) {
    const std::uint32_t odd = shared(control_->odd_peer).load(std::memory_order_relaxed);
    const int rank = static_cast<int>(odd) - 1;
    reason_ = Status::error(code,
                            operation_ + ": rank " + std::to_string(rank) +
                                " is in another operation, or in this one with another size, "
                                "type, operation or algorithm; all ranks must call alike",
                            {rank});
    return reason_;
  }
  std::vector<int> ranks = awaited_ranks();
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", static_cast<double>(timeout_) / 1e9);
  std::string message = operation_ + ": not done after " + seconds + " s";
  if (!ranks.empty()) message += "; the device still waited for ranks " + to_text(ranks);
  reason_ = Status::error(code, std::move(message), std::move(ranks));
  return reason_;
}

}  // namespace pycoll::device
