// A collective that runs many times. It is bound to its plan and channels once, so that each run
// only changes the addresses of its memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "executor/execution.h"
#include "executor/request.h"

namespace pycoll::engine {

using executor::CollectiveRequest;
using executor::Execution;

// Owned by shared pointers: the engine keeps a running call alive after its caller has dropped it.
// The request is constant. The other state belongs to one engine, the first that entered the call.
class Call {
 public:
  // Only the lengths of the memory in `request` are used. `is_short`: see kShortBytes.
  explicit Call(CollectiveRequest request, bool is_short = true)
      : request_(std::move(request)), is_short_(is_short) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const CollectiveRequest& request() const { return request_; }
  bool is_short() const { return is_short_; }

  // Short calls are operations whose input and output have at most this many bytes. A thread keeps
  // its locks while it waits for such an operation, because releasing them takes longer than the
  // operation. Longer operations gain nothing from being bound; start them as requests. The engine
  // makes long calls of those that may run at the same time.
  static constexpr std::uint64_t kShortBytes = 64 * 1024;
  // The most collectives that may be in progress at once: the number of segments that a channel
  // holds before its receiver reads.
  static constexpr std::size_t kRunsMax = transport::kChannelDepth;

 private:
  friend class Collectives;

  // One run of the call, bound on first use.
  struct Run {
    Execution execution;
    bool bound = false;
    bool busy = false;
  };

  const CollectiveRequest request_;
  const bool is_short_;
  std::array<Run, kRunsMax> runs_;
};

}  // namespace pycoll::engine
