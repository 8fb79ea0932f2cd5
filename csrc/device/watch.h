// The host's eye on kernels that wait for other ranks: it ends their waits when the deadline has
// passed or the caller knows that they wait in vain, and says afterwards what happened.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/program.h"

namespace pycoll::device {

// Over one rank's Control and the words behind it, which outlive the watch. One thread at a time;
// kernels may run meanwhile.
class Watch {
 public:
  Watch(Control* control, std::uint32_t* awaited, std::uint32_t size, Clock& clock);

  // An operation of that name begins and has this long. Requires: the last one's outcome() was ok.
  void begin(std::string operation, Nanoseconds timeout);

  // Looks once; cheap. True if the kernels have been told to stop, by whomever.
  bool look();

  // Tells the kernels to stop: a peer was lost or has given up, as `reason` says. The first reason
  // stays.
  void give_up(Status reason);

  // Once the kernels have ended: ok, what give_up() was told, kMismatch naming the rank whose
  // segment belonged to another operation, or kTimeout naming the ranks that were waited for.
  // What comes after a failure fails alike: counters of ports no longer agree.
  Status outcome();

 private:
  std::uint32_t stop() const;
  void tell(Code code);
  std::vector<int> awaited_ranks() const;

  Control* control_;
  std::uint32_t* awaited_;
  std::uint32_t size_;
  Clock& clock_;
  std::string operation_;
  Nanoseconds timeout_ = kForever;
  Nanoseconds deadline_ = kForever;
  Status reason_;
};

}  // namespace pycoll::device
