#include "transport/verbs/link/verbs_peer_watch.h"

#include <sys/socket.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "transport/verbs/verbs_options.h"

namespace pycoll::transport::verbs {
namespace {

std::string reported_by(const Device& device) {
  return "; the device reported: " + device.trouble();
}

}  // namespace

// The end of the connection means that the peer's process is gone, unless a goodbye is still on the
// way. The peer saw that goodbye acknowledged before it closed the connection, but this rank's
// device may report it later than the kernel reports the end.
bool PeerWatch::read_liveness(Nanoseconds now) {
  char bytes[64];
  const ssize_t count = ::recv(liveness_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  const int error = count < 0 ? errno : 0;
  if (error == EAGAIN || error == EINTR) return false;
  if (retired_) return true;
  if (count > 0) {
    doom(peer_name_ + " sent bytes where none belong", now);
  } else if (error != 0 && error != ECONNRESET) {
    doom("no answer from " + peer_name_ + ": " + std::generic_category().message(error), now);
  } else {
    grace_ends_ = std::min(grace_ends_, now + kGoodbyeGrace);
  }
  return true;
}

void PeerWatch::doom(std::string reason, Nanoseconds now) {
  failure_ = std::move(reason);
  failed_device_ = nullptr;
  grace_ends_ = now;
}

void PeerWatch::note_failure(Device& device, ibv_wc_status status) {
  if (retired_ || has_failed()) return;
  const std::string text = device.api().wc_status_str(status);
  failed_device_ = &device;
  failed_here_ =
      status == IBV_WC_LOC_QP_OP_ERR || status == IBV_WC_FATAL_ERR || status == IBV_WC_GENERAL_ERR;
  failure_ = status == IBV_WC_RETRY_EXC_ERR ? no_answer(device) + " (" + text + ")"
                                            : "the queue pair to " + peer_name_ + " on " +
                                                  device.name() + " failed (" + text + ")";
}

void PeerWatch::judge(Nanoseconds now) {
  if (retired_ || !has_failed()) return;
  const bool awaits_report = failed_here_ && !is_explained();
  grace_ends_ = std::min(grace_ends_, awaits_report ? now + kReasonGrace : now);
}

void PeerWatch::watch_ports(Nanoseconds now) {
  if (retired_ || silent_rail() == nullptr) {
    silence_ends_ = kForever;
  } else if (silence_ends_ == kForever) {
    silence_ends_ = now + kSilenceLasts;
  }
}

void PeerWatch::retire() {
  retired_ = true;
  grace_ends_ = silence_ends_ = kForever;
}

bool PeerWatch::grace_is_over(Nanoseconds now) const {
  return grace_ends() <= now || (has_failed() && is_explained());
}

std::string PeerWatch::reason() const {
  if (has_failed()) return failure_text();
  const Rail* silent = silent_rail();
  if (silent != nullptr && silence_ends_ < grace_ends_) {
    return no_answer(silent->device()) + reported_by(silent->device());
  }
  return "the process of " + peer_name_ + " ended without a goodbye";
}

std::string PeerWatch::reason_to_stop(const Device& device) const {
  return has_failed() ? failure_text() : no_answer(device);
}

bool PeerWatch::is_explained() const {
  return failed_device_ != nullptr && !failed_device_->trouble().empty();
}

std::string PeerWatch::failure_text() const {
  return is_explained() ? failure_ + reported_by(*failed_device_) : failure_;
}

std::string PeerWatch::no_answer(const Device& device) const {
  return peer_name_ + " does not answer over " + device.name();
}

Rail* PeerWatch::silent_rail() const {
  const auto silent = std::find_if(rails_.begin(), rails_.end(), [](Rail& rail) {
    return !rail.device().trouble().empty() && rail.queue().owes_completions();
  });
  return silent == rails_.end() ? nullptr : &*silent;
}

}  // namespace pycoll::transport::verbs
