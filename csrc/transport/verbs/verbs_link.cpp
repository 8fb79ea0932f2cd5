#include "transport/verbs/verbs_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "transport/tcp/tcp_socket.h"

namespace pycoll::transport::verbs {

VerbsLink::VerbsLink(const std::vector<OpenPort*>& ports, int peer)
    : peer_(peer), rail_count_(static_cast<std::uint32_t>(ports.size())) {
  rails.reserve(ports.size());
  for (OpenPort* port : ports) {
    rails.emplace_back(*port, peer, static_cast<std::uint32_t>(rails.size()), rail_count_);
  }
  sends_.reserve(kChannelsMax);
  recvs_.reserve(kChannelsMax);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    sends_.emplace_back(number, static_cast<ChannelOwner&>(*this));
    recvs_.emplace_back(number, static_cast<ChannelOwner&>(*this));
  }
}

Status VerbsLink::prepare(std::string* address) {
  std::string all;
  for (Rail& rail : rails) {
    PeerAddress own;
    if (Status status = rail.open(&own); !status.ok()) return status;
    all.append(reinterpret_cast<const char*>(&own), sizeof(own));
  }
  *address = std::move(all);
  return {};
}

bool VerbsLink::accept_address(const std::string& text,
                               std::array<PeerAddress, kRailsMax>* peers) const {
  if (text.size() != rails.size() * sizeof(PeerAddress)) return false;
  std::memcpy(peers->data(), text.data(), text.size());
  return std::all_of(rails.begin(), rails.end(),
                     [&](const Rail& rail) { return rail.accepts((*peers)[rail.index()]); });
}

Status VerbsLink::connect(const std::string& address, UniqueFd liveness, std::string name) {
  name_ = std::move(name);
  std::array<PeerAddress, kRailsMax> peers;
  if (!accept_address(address, &peers)) {
    std::string ports;
    for (const Rail& rail : rails) ports += (ports.empty() ? "" : ", ") + rail.device().name();
    return Status::error(Code::kInvalidArgument,
                         "verbs: " + std::to_string(address.size()) + " bytes from " + name_ +
                             " are no address of this pycoll version for " + ports +
                             "; run the same version on every rank, and InfiniBand or RoCE on all",
                         {peer_});
  }
  if (Status status = prepare_socket(liveness.get()); !status.ok()) return status;
  for (Rail& rail : rails) {
    if (Status status = rail.queue().connect(peers[rail.index()], name_); !status.ok()) {
      return status;
    }
  }
  liveness_ = std::move(liveness);
  connected_ = true;
  return {};
}

SendChannel& VerbsLink::send_channel(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  return sends_[number];
}

RecvChannel& VerbsLink::recv_channel(std::uint32_t number) {
  PYCOLL_ASSERT(number < kChannelsMax, "channel %u, at most %u", number, kChannelsMax - 1);
  return recvs_[number];
}

void VerbsLink::post(const Notice& notice) {
  if (outgoing_notice_.failure != 0) return;  // a failure is final
  outgoing_notice_ = notice;
  notice_waits_ = true;
  if (state_ == LinkState::kLost) {
    post_last_notice();
  } else {
    (void)flush();
  }
}

std::string VerbsLink::grant(std::uint64_t offset, std::size_t bytes) {
  const Region& region = rails.front().region();
  PYCOLL_ASSERT(region.peers_write && offset <= region.bytes && bytes <= region.bytes - offset,
                "a grant of %zu bytes at %llu", bytes, static_cast<unsigned long long>(offset));
  Grant made;
  made.address = region.address + offset;
  made.bytes = bytes;
  for (const Rail& rail : rails) made.rkeys[rail.index()] = rail.region_keys().rkey;
  granted_ = true;
  return {reinterpret_cast<const char*>(&made), sizeof(made)};
}

Status VerbsLink::accept(const std::string& grant) {
  Grant given;
  if (grant.size() == sizeof(given)) std::memcpy(&given, grant.data(), sizeof(given));
  if (grant.size() != sizeof(given) || given.magic != Grant::kMagic || given.bytes == 0 ||
      given.address + given.bytes < given.bytes) {
    return Status::error(Code::kInvalidArgument,
                         "verbs: " + std::to_string(grant.size()) + " bytes from " + name_ +
                             " are no grant of this pycoll version; run the same on every rank",
                         {peer_});
  }
  accepted_ = given;
  return {};
}

void VerbsLink::submit(std::uint32_t number) {
  line_[(line_begin_ + line_count_) % kLineMax] = static_cast<std::uint8_t>(number);
  ++line_count_;
  (void)flush();
}

void VerbsLink::credit_due(std::uint32_t number, bool now) {
  if (state_ != LinkState::kOpen) return;
  credits_due_ |= 1u << number;
  if (now) (void)flush();
}

bool VerbsLink::handle_send(std::uint32_t index, std::uint64_t id) {
  rails[index].queue().note_send(id);
  silence_ends_ = kForever;
  if (goodbye_received_ && state_ == LinkState::kOpen && !reads_user_memory()) {
    end(LinkState::kClosed, "");
    return true;
  }
  return std::exchange(has_waiter, false);
}

namespace {

std::string reported_by(const Device& device) {
  return "; the device reported: " + device.trouble();
}

}  // namespace

void VerbsLink::handle_failure(std::uint32_t index, const ibv_wc& completion) {
  rails[index].broken = true;
  if (state_ != LinkState::kOpen || goodbye_received_ || !failure_.empty()) return;
  Device& device = rails[index].device();
  const std::string status = device.api().wc_status_str(completion.status);
  failed_device_ = &device;
  failed_here_ = completion.status == IBV_WC_LOC_QP_OP_ERR ||
                 completion.status == IBV_WC_FATAL_ERR || completion.status == IBV_WC_GENERAL_ERR;
  failure_ =
      completion.status == IBV_WC_RETRY_EXC_ERR
          ? no_answer(device) + " (" + status + ")"
          : "the queue pair to " + name_ + " on " + device.name() + " failed (" + status + ")";
}

void VerbsLink::judge(Nanoseconds now) {
  if (state_ != LinkState::kOpen || failure_.empty() || goodbye_received_) return;
  if (failed_here_ && !is_explained()) {
    grace_ends_ = std::min(grace_ends_, now + kReasonGrace);
  } else {
    fail(failure_text());
  }
}

bool VerbsLink::is_explained() const {
  return failed_device_ != nullptr && !failed_device_->trouble().empty();
}

std::string VerbsLink::failure_text() const {
  return is_explained() ? failure_ + reported_by(*failed_device_) : failure_;
}

std::string VerbsLink::no_answer(const Device& device) const {
  return name_ + " does not answer over " + device.name();
}

bool VerbsLink::uses(const Device& device) const {
  return std::any_of(rails.begin(), rails.end(),
                     [&](const Rail& rail) { return &rail.device() == &device; });
}

void VerbsLink::fail(std::string reason) { end(LinkState::kLost, std::move(reason)); }

void VerbsLink::end(LinkState state, std::string reason) {
  if (state_ != LinkState::kOpen) return;
  state_ = state;
  reason_ = std::move(reason);
  grace_ends_ = silence_ends_ = kForever;
  drop_output();
}

void VerbsLink::drop_output() {
  line_count_ = 0;
  credits_due_ = 0;
  notice_waits_ = notice_seen_due_ = false;
  for (VerbsSendChannel& channel : sends_) channel.abandon();
}

void VerbsLink::let_go() {
  has_let_go = true;
  for (VerbsSendChannel& channel : sends_) channel.let_go();
}

bool VerbsLink::reads_user_memory() {
  return !std::all_of(sends_.begin(), sends_.end(),
                      [](VerbsSendChannel& channel) { return channel.flushed(); });
}

void VerbsLink::stop() {
  for (Rail& rail : rails) {
    const auto reads = [&](const VerbsSendChannel& one) { return one.reads_over(rail); };
    if (std::none_of(sends_.begin(), sends_.end(), reads)) continue;
    fail(failure_.empty() ? no_answer(rail.device()) : failure_text());
    rail.broken = true;
    rail.queue().stop();
  }
}

// The end of the connection means that the peer's process is gone, unless a goodbye is still on the
// way. The peer saw that goodbye acknowledged before it closed the connection, but this rank's
// device may report it later than the kernel reports the end.
bool VerbsLink::read_liveness(Nanoseconds now) {
  char bytes[64];
  const ssize_t count = ::recv(liveness_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  const int error = count < 0 ? errno : 0;
  if (error == EAGAIN || error == EINTR) return false;
  if (state_ == LinkState::kOpen && !goodbye_received_) {
    if (count > 0) {
      fail(name_ + " sent bytes where none belong");
    } else if (error != 0 && error != ECONNRESET) {
      fail("no answer from " + name_ + ": " + std::generic_category().message(error));
    } else {
      grace_ends_ = std::min(grace_ends_, now + kGoodbyeGrace);
    }
  }
  return true;
}

Rail* VerbsLink::silent_rail() {
  const auto silent = std::find_if(rails.begin(), rails.end(), [](Rail& rail) {
    return !rail.device().trouble().empty() && rail.queue().owes_completions();
  });
  return silent == rails.end() ? nullptr : &*silent;
}

void VerbsLink::watch_ports(Nanoseconds now) {
  if (state_ != LinkState::kOpen || goodbye_received_ || silent_rail() == nullptr) {
    silence_ends_ = kForever;
  } else if (silence_ends_ == kForever) {
    silence_ends_ = now + kSilenceLasts;
  }
}

bool VerbsLink::grace_is_over(Nanoseconds now) const {
  return grace_ends() <= now || (!failure_.empty() && is_explained());
}

void VerbsLink::end_grace() {
  const Rail* silent = silent_rail();
  if (!failure_.empty()) {
    fail(failure_text());
  } else if (silent != nullptr && silence_ends_ < grace_ends_) {
    fail(no_answer(silent->device()) + reported_by(silent->device()));
  } else {
    fail("the process of " + name_ + " ended without a goodbye");
  }
}

}  // namespace pycoll::transport::verbs
