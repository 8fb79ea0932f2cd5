// Watches kernels that wait for other ranks from the host. It ends their waits when the deadline
// has passed or the caller knows that they wait in vain, and reports the failure afterwards.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/kernels/program.h"

namespace pycoll::device {

// Words that kernels and host share, in memory that both reach.
struct Words {
  Control* control = nullptr;
  std::span<std::uint32_t> waits;  // one per rank
  std::span<std::uint32_t> beats;  // one per block
};

// Watches one rank's words, which outlive the watch. One thread at a time, except give_up();
// kernels may run at the same time.
class Watch {
 public:
  // The operation of a program's label: "all_reduce of 8 float32, op sum".
  using Names = std::function<std::string(std::uint32_t label)>;

  Watch(const Words& words, Clock& clock, Names names);

  // A block may run this long, counted from the first look that finds it running. The deadline
  // holds for launched operations and for replayed graphs.
  void set_timeout(Nanoseconds timeout) { timeout_ = timeout; }

  // Reads the beats and tells the kernels to stop after the deadline. True if they have been told
  // to stop, for any reason. Cheap.
  bool look();
  // How long the longest-running block has been running, as of the last look; zero if none runs.
  Nanoseconds running() const { return running_; }

  // Tells the kernels to stop since a peer was lost or has given up, as `reason` says. The first
  // reason stays.
  void give_up(Status reason);

  // Requires: the kernels have ended. Returns ok, or the reason of give_up(). Otherwise the status
  // names ranks: for kMismatch the sender of a segment of another operation, for kReduction the
  // sender of codes that do not decode, and for kTimeout the ranks that were waited for. Later
  // operations fail with the same status, since the counters of ports no longer agree.
  Status outcome();
  // The text of the operation that began last.
  std::string operation() const;
  Nanoseconds timeout() const { return timeout_; }

 private:
  struct Seen {
    std::uint32_t beat = 0;
    Nanoseconds since = 0;
  };

  std::uint32_t stop() const;
  void tell(Code code) const;
  std::vector<int> waited_ranks() const;

  Words words_;
  Clock& clock_;
  Names names_;
  Nanoseconds timeout_ = kForever;
  Nanoseconds running_ = 0;
  std::vector<Seen> seen_;  // by block
  Status reason_;
};

}  // namespace pycoll::device
