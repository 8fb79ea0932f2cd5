// A collective that is called again and again: bound to its plan and channels once, so that only
// the addresses of its memory are new each time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "runtime/execution.h"
#include "runtime/request.h"

namespace pycoll::runtime {

// Owned by shared pointers: whoever may let go of one while it runs leaves it to the engine. The
// request is constant; the rest belongs to one engine, the first that entered it.
class Call {
 public:
  // The memory of `request` counts for its lengths only.
  explicit Call(CollectiveRequest request) : request_(std::move(request)) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const CollectiveRequest& request() const { return request_; }

  // Operations whose input and output have at most so many bytes are over, once the peers have
  // come, before it would have been worth while to give a lock away. Longer ones gain nothing from
  // being bound: they had better be requests.
  static constexpr std::uint64_t kShortBytes = 64 * 1024;
  // So many calls may be under way at once: what a channel holds without its receiver's help.
  static constexpr std::size_t kRunsMax = transport::kChannelDepth;

 private:
  friend class Engine;

  // One run of the call; bound when it is first needed.
  struct Run {
    Execution execution;
    bool bound = false;
    bool busy = false;
  };

  const CollectiveRequest request_;
  std::array<Run, kRunsMax> runs_;
};

}  // namespace pycoll::runtime
