// Everything between this rank and one peer over RDMA: a queue pair, the two areas, channels and
// notices, and the judgement over all of them: open, closed or lost.
//
// Threads: those of the Transport, which owns it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/verbs_channel.h"
#include "transport/verbs_queue.h"

namespace pycoll::transport::verbs {

class VerbsLink final : public Link {
 public:
  // `device` and `registrations` outlive the link.
  VerbsLink(Device& device, Registrations& registrations, int peer);

  // Makes pair and areas; `address` gets what the peer's connect() wants. Called once.
  Status prepare(std::string* address);
  // As VerbsTransport::attach. Called once, after prepare().
  Status connect(const std::string& address, UniqueFd liveness, std::string name);
  bool connected() const { return connected_; }

  int peer() const override { return peer_; }
  SendChannel& send_channel(std::uint32_t number) override;
  RecvChannel& recv_channel(std::uint32_t number) override;
  void post(const Notice& notice) override;
  Notice newest() override { return newest_; }
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // --- for the channels
  std::byte* outgoing(std::size_t offset) const { return outgoing_->at(offset); }
  std::byte* incoming(std::size_t offset) const { return incoming_->at(offset); }
  bool is_done(std::uint64_t position) const { return queue_.done(position); }
  Registrations& registrations() const { return registrations_; }
  bool has_let_go() const { return has_let_go_; }
  // A segment was committed on channel `number`.
  void submit(std::uint32_t number);
  // Room was freed of which the peer should know, now or with the next flush().
  void credit_due(std::uint32_t number, bool now);
  // Somebody asked in vain: the next completion of what was sent is news.
  void note_want() { wanted_ = true; }

  // --- for the transport
  // A message has arrived, or requests are done; true if that is news for the owner.
  bool received(std::uint32_t immediate, std::uint32_t bytes);
  bool sent(std::uint64_t id);
  // A request of either kind has failed.
  void failed(const ibv_wc& completion);
  void fail(std::string reason);
  // Posts what waits; true if anything left.
  bool flush();
  bool has_output() const;
  int liveness_fd() const { return liveness_.get(); }
  // The socket has something to say: reads it. True if it has ended or failed; drop it then.
  bool hear_liveness(Nanoseconds now);
  void drop_liveness() { liveness_.reset(); }
  // No memory of users is sent from any more, but for what the device has been given: that ends by
  // itself where the peer answers, or by stop().
  void let_go();
  // Whether the device may be reading memory of users.
  bool reads_users();
  // Ends what the device does for this link; the link is lost, if it was open.
  void stop();
  // The end of the grace for a goodbye, or kForever when none is awaited.
  Nanoseconds grace_ends() const { return grace_ends_; }
  void end_grace();

  // Orderly end: a closing notice, unless a failure came before, and goodbye behind all output.
  void say_goodbye();
  // The peer has all of it, or will not get it any more.
  bool is_told() const;

 private:
  static constexpr std::size_t kLineMax = kChannelsMax * kChannelDepth;

  bool accept_address(const std::string& text, PeerAddress* peer) const;
  Piece piece(std::size_t offset, std::size_t bytes) const;
  void tell(Immediate immediate);
  void post_segment(VerbsSendChannel& channel);
  void post_credit(std::uint32_t number);
  void post_notice(NoticePlace place);
  bool post_one();
  bool receive_segment(Immediate what, std::uint32_t bytes);
  bool receive_credit(Immediate what);
  bool receive_notice(Immediate what);
  bool receive_goodbye();
  bool malformed(const std::string& what);
  void drop_output();
  void end(LinkState state, std::string reason);

  Device& device_;
  Registrations& registrations_;
  const int peer_;
  std::string name_;
  std::unique_ptr<Area> outgoing_;
  std::unique_ptr<Area> incoming_;
  Queue queue_;  // destroyed before the areas
  UniqueFd liveness_;
  std::vector<VerbsSendChannel> sends_;
  std::vector<VerbsRecvChannel> recvs_;

  // Channel numbers, one per committed segment that waits for room in the queue: a ring.
  std::array<std::uint8_t, kLineMax> line_{};
  std::size_t line_begin_ = 0;
  std::size_t line_count_ = 0;
  std::uint32_t credits_due_ = 0;  // a bit per channel

  Notice newest_;  // from the peer
  Notice outgoing_notice_;
  bool notice_waits_ = false;   // not yet posted
  bool notice_unread_ = false;  // the peer has not read the one before
  std::uint64_t notice_free_at_ = 0;
  bool notice_seen_due_ = false;

  enum class Goodbye : std::uint8_t { kNone, kWanted, kPosted };
  Goodbye goodbye_ = Goodbye::kNone;
  std::uint64_t goodbye_done_at_ = 0;
  // The peer's is here, and the link closes when the device reads no more.
  bool goodbye_heard_ = false;

  LinkState state_ = LinkState::kOpen;
  std::string reason_;
  Nanoseconds grace_ends_ = kForever;
  bool connected_ = false;
  bool wanted_ = false;
  bool has_let_go_ = false;
};

}  // namespace pycoll::transport::verbs
