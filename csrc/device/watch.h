// The host's eye on kernels that wait for other ranks: it ends their waits when the deadline has
// passed or the caller knows that they wait in vain, and says afterwards what happened.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/program.h"

namespace pycoll::device {

// What kernels and host share, in memory that both reach.
struct Words {
  Control* control = nullptr;
  std::span<std::uint32_t> awaited;  // one per rank
  std::span<std::uint32_t> beats;    // one per block
};

// Over one rank's words, which outlive the watch. One thread at a time, apart from give_up();
// kernels may run meanwhile.
class Watch {
 public:
  // What the program of that label does: "all_reduce of 8 float32, op sum".
  using Names = std::function<std::string(std::uint32_t label)>;

  Watch(const Words& words, Clock& clock, Names names);

  // A block may run this long, counted from the first look that finds it running: the deadline of
  // what the host launched and of what graphs replay.
  void set_timeout(Nanoseconds timeout) { timeout_ = timeout; }

  // Looks once; cheap. True if the kernels have been told to stop, by whomever.
  bool look();
  // How long the block that runs longest has been running, as of the last look; zero if none runs.
  Nanoseconds running() const { return running_; }

  // Tells the kernels to stop: a peer was lost or has given up, as `reason` says. The first reason
  // stays.
  void give_up(Status reason);

  // Once the kernels have ended: ok, what give_up() was told, kMismatch naming the rank whose
  // segment belonged to another operation, or kTimeout naming the ranks that were waited for.
  // What comes after a failure fails alike: counters of ports no longer agree.
  Status outcome();
  // What ran last, in words.
  std::string operation() const;
  Nanoseconds timeout() const { return timeout_; }

 private:
  struct Seen {
    std::uint32_t beat = 0;
    Nanoseconds since = 0;
  };

  std::uint32_t stop() const;
  void tell(Code code) const;
  std::vector<int> awaited_ranks() const;

  Words words_;
  Clock& clock_;
  Names names_;
  Nanoseconds timeout_ = kForever;
  Nanoseconds running_ = 0;
  std::vector<Seen> seen_;  // by block
  Status reason_;
};

}  // namespace pycoll::device
