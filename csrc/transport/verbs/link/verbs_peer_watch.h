// Watches for signs that the peer or a device has failed: failed requests, the end of the peer's
// process, and ports in trouble that report no more completions. Each sign starts a grace period,
// in which the peer's goodbye or the report of a device may arrive. After it the watch names the
// reason for which the link is lost.
//
// Threads: those of the Transport.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/verbs/verbs_rail.h"

namespace pycoll::transport::verbs {

class PeerWatch {
 public:
  // `rails` are the link's; `peer_name` names the peer in reasons.
  PeerWatch(std::vector<Rail>& rails, const std::string& peer_name)
      : rails_(rails), peer_name_(peer_name) {}

  // The peer's process holds the other end of this socket.
  void begin(UniqueFd liveness) { liveness_ = std::move(liveness); }
  int liveness_fd() const { return liveness_.get(); }
  // The liveness socket is readable. Returns true if it has ended or failed; the caller then drops
  // it and looks whether a grace period is over.
  bool read_liveness(Nanoseconds now);
  void drop_liveness() { liveness_.reset(); }

  // A request of that device has failed. judge() decides whether the link is lost, after all
  // earlier completions have been taken: the peer may have closed in good order on another device.
  void note_failure(Device& device, ibv_wc_status status);
  // The device has completed a request, so its port is not silent.
  void note_completion() { silence_ends_ = kForever; }
  // Whether the link will be lost, so that nothing should be sent any more.
  bool has_failed() const { return !failure_.empty(); }
  // Judges a failed request: the link is lost now, or after a grace period if this rank's own
  // device gave up, because that device may still report the reason.
  void judge(Nanoseconds now);
  // Called periodically. A port in trouble that owes completions starts a grace period, too.
  void watch_ports(Nanoseconds now);
  // Nothing is judged any more: the link has ended, or the peer needs nothing from it.
  void retire();

  // End of the first grace period; kForever if there is none.
  Nanoseconds grace_ends() const { return std::min(grace_ends_, silence_ends_); }
  // Whether the grace period has ended, or the device has reported. Requires, here and for
  // reason(): there is a grace period.
  bool grace_is_over(Nanoseconds now) const;
  // The reason for which the link is lost after the grace period.
  std::string reason() const;
  // The reason if the link gives up requests that `device` has not completed.
  std::string reason_to_stop(const Device& device) const;

 private:
  // Whether the device of the failed request has reported a reason.
  bool is_explained() const;
  std::string failure_text() const;
  std::string no_answer(const Device& device) const;
  // The link is lost at `now`.
  void doom(std::string reason, Nanoseconds now);
  // A rail whose port is in trouble and still owes completions, or nullptr.
  Rail* silent_rail() const;

  std::vector<Rail>& rails_;
  const std::string& peer_name_;
  UniqueFd liveness_;
  std::string failure_;
  const Device* failed_device_ = nullptr;
  bool failed_here_ = false;  // the local device failed, not the peer
  bool retired_ = false;
  Nanoseconds grace_ends_ = kForever;
  Nanoseconds silence_ends_ = kForever;  // of ports; every completion restarts the wait
};

}  // namespace pycoll::transport::verbs
