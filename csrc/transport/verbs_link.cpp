#include "transport/verbs_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "transport/tcp_socket.h"

namespace pycoll::transport::verbs {

VerbsLink::VerbsLink(Device& device, Registrations& registrations, int peer)
    : device_(device),
      registrations_(registrations),
      peer_(peer),
      queue_(device, static_cast<std::uint32_t>(peer)) {
  sends_.reserve(kChannelsMax);
  recvs_.reserve(kChannelsMax);
  for (std::uint32_t number = 0; number < kChannelsMax; ++number) {
    sends_.emplace_back(number, *this);
    recvs_.emplace_back(number, *this);
  }
}

Status VerbsLink::prepare(std::string* address) {
  Status status = Area::make(device_, kAreaBytes, 0, &outgoing_);
  if (!status.ok()) return status;
  const int writable = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  status = Area::make(device_, kAreaBytes, writable, &incoming_);
  if (!status.ok()) return status;
  status = queue_.open();
  if (!status.ok()) return status;
  PeerAddress own = queue_.address();
  own.area = reinterpret_cast<std::uint64_t>(incoming_->at(0));
  own.rkey = incoming_->remote_key();
  address->assign(reinterpret_cast<const char*>(&own), sizeof(own));
  return {};
}

bool VerbsLink::accept_address(const std::string& text, PeerAddress* peer) const {
  if (text.size() != sizeof(*peer)) return false;
  std::memcpy(peer, text.data(), sizeof(*peer));
  return peer->magic == PeerAddress::kMagic && peer->mtu >= IBV_MTU_256 &&
         peer->mtu <= IBV_MTU_4096 && peer->link_layer == device_.port_facts().link_layer;
}

Status VerbsLink::connect(const std::string& address, UniqueFd liveness, std::string name) {
  name_ = std::move(name);
  PeerAddress peer;
  if (!accept_address(address, &peer)) {
    return Status::error(Code::kInvalidArgument,
                         "verbs: " + std::to_string(address.size()) + " bytes from " + name_ +
                             " are no address of this pycoll version on " + device_.name() +
                             "; run the same version on every rank, and InfiniBand or RoCE on all",
                         {peer_});
  }
  if (Status status = prepare_socket(liveness.get()); !status.ok()) return status;
  if (Status status = queue_.connect(peer, name_); !status.ok()) return status;
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
  (void)flush();
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

bool VerbsLink::sent(std::uint64_t id) {
  queue_.sent(id);
  if (goodbye_heard_ && state_ == LinkState::kOpen && !reads_users()) {
    end(LinkState::kClosed, "");
    return true;
  }
  return std::exchange(wanted_, false);
}

void VerbsLink::failed(const ibv_wc& completion) {
  if (state_ != LinkState::kOpen || goodbye_heard_) return;
  const std::string status = device_.api().wc_status_str(completion.status);
  const std::string& trouble = device_.trouble();
  std::string reason =
      completion.status == IBV_WC_RETRY_EXC_ERR
          ? name_ + " does not answer over " + device_.name() + " (" + status + ")"
          : "the queue pair to " + name_ + " on " + device_.name() + " failed (" + status + ")";
  if (!trouble.empty()) reason += "; the device told of: " + trouble;
  fail(std::move(reason));
}

void VerbsLink::fail(std::string reason) { end(LinkState::kLost, std::move(reason)); }

void VerbsLink::end(LinkState state, std::string reason) {
  if (state_ != LinkState::kOpen) return;
  state_ = state;
  reason_ = std::move(reason);
  grace_ends_ = kForever;
  drop_output();
}

void VerbsLink::drop_output() {
  line_count_ = 0;
  credits_due_ = 0;
  notice_waits_ = notice_seen_due_ = false;
  for (VerbsSendChannel& channel : sends_) channel.abandon();
}

void VerbsLink::let_go() {
  has_let_go_ = true;
  for (VerbsSendChannel& channel : sends_) channel.let_go();
}

bool VerbsLink::reads_users() {
  return !std::all_of(sends_.begin(), sends_.end(),
                      [](VerbsSendChannel& channel) { return channel.flushed(); });
}

void VerbsLink::stop() {
  fail(name_ + " does not answer over " + device_.name());
  queue_.stop();
}

// A connection that ends tells that the process is gone, unless its goodbye is still on the way:
// that one was acknowledged before, but the device may show it later than the kernel shows this.
bool VerbsLink::hear_liveness(Nanoseconds now) {
  char bytes[64];
  const ssize_t count = ::recv(liveness_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  const int error = count < 0 ? errno : 0;
  if (error == EAGAIN || error == EINTR) return false;
  if (state_ == LinkState::kOpen && !goodbye_heard_) {
    if (count > 0) {
      fail(name_ + " sent bytes where none belong");
    } else if (error != 0 && error != ECONNRESET) {
      fail("no word from " + name_ + ": " + std::generic_category().message(error));
    } else {
      grace_ends_ = now + VerbsTransport::kGoodbyeGrace;
    }
  }
  return true;
}

void VerbsLink::end_grace() {
  fail("the process of " + name_ + " ended without a goodbye");
  grace_ends_ = kForever;
}

}  // namespace pycoll::transport::verbs
