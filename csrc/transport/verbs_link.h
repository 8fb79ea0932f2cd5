// Everything between this rank and one peer over RDMA: rails, channels and notices, and the
// judgement over all of them: open, closed or lost. A link with a rail that fails is lost.
//
// Threads: those of the Transport, which owns it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/verbs_channel.h"
#include "transport/verbs_rail.h"

namespace pycoll::transport::verbs {

class VerbsLink final : public Link {
 public:
  // A rail over each of `ports`, which outlive the link. Requires: is_rail_count().
  VerbsLink(const std::vector<OpenPort*>& ports, int peer);

  // Makes pairs and areas; `address` gets what the peer's connect() wants. Called once.
  Status prepare(std::string* address);
  // As VerbsTransport::attach. Called once, after prepare().
  Status connect(const std::string& address, UniqueFd liveness, std::string name);
  bool connected() const { return connected_; }

  int peer() const override { return peer_; }
  SendChannel& send_channel(std::uint32_t number) override;
  RecvChannel& recv_channel(std::uint32_t number) override;
  void post(const Notice& notice) override;
  Notice newest() override { return newest_; }
  std::uint64_t notice_count() const { return notices_received_; }
  std::string grant(std::uint64_t offset, std::size_t bytes) override;
  Status accept(const std::string& grant) override;
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // --- for the channels
  const Rail& rail_of(std::uint32_t channel, std::uint32_t segment) const {
    return rails_[rail_of_segment(channel, segment, rail_count_)];
  }
  bool has_let_go() const { return has_let_go_; }
  // A segment was committed on channel `number`.
  void submit(std::uint32_t number);
  // Room was freed of which the peer should know, now or with the next flush().
  void credit_due(std::uint32_t number, bool now);
  // Somebody asked in vain: the next completion of what was sent is news.
  void note_want() { wanted_ = true; }

  // --- for the transport
  // A message has arrived on rail `index`, or requests are done; true if that is news for the
  // owner.
  [[nodiscard]] bool received(std::uint32_t index, std::uint32_t immediate, std::uint32_t bytes);
  [[nodiscard]] bool sent(std::uint32_t index, std::uint64_t id);
  // A request of either kind has failed. What that means judge() says, once all completions that
  // came before it have been taken: the peer may have closed in good order on another device.
  void failed(std::uint32_t index, const ibv_wc& completion);
  // Where this rank's own device gave up, the device is given a moment to say why: a grace.
  void judge(Nanoseconds now);
  void fail(std::string reason);
  bool uses(const Device& device) const;
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
  // Gives up the rails over which devices read memory of users; the link is lost, if it was open.
  // Requires: reads_users().
  void stop();
  // To be called now and then: a port in trouble that says nothing more begins a grace, too.
  void watch_ports(Nanoseconds now);
  // When to wait no longer for a goodbye, or for what a device has to say; kForever when neither
  // is awaited.
  Nanoseconds grace_ends() const { return std::min(grace_ends_, silence_ends_); }
  // Or it has been said. Requires here and below: one of them is awaited.
  bool grace_is_over(Nanoseconds now) const;
  void end_grace();

  // Orderly end: a closing notice, unless a failure came before, and goodbye behind all output.
  void say_goodbye();
  // The peer has all of it, or will not get it any more.
  bool is_told() const;

 private:
  static constexpr std::size_t kLineMax = kChannelsMax * kVerbsDepth;

  bool accept_address(const std::string& text, std::array<PeerAddress, kRailsMax>* peers) const;
  bool has_room();
  void post_segment(VerbsSendChannel& channel);
  // Whether the channel's counts travel over the rail.
  bool carries_credits(const Rail& rail, std::uint32_t number) const;
  // The peer waits for counts that travel over the rail.
  bool owes_credits(const Rail& rail) const;
  void write_credits(const Rail& rail, SlotHeader* header);
  Piece payload_of(const VerbsSendChannel::Course& course, const Rail& rail,
                   const Piece& in_slot) const;
  void post_credit(std::uint32_t number);
  void post_notice(Rail& rail, NoticePlace place);
  void post_goodbyes();
  void post_last_notice();
  [[nodiscard]] bool post_one();
  [[nodiscard]] bool receive_segment(Rail& rail, Immediate what, std::uint32_t bytes);
  [[nodiscard]] bool accept_released(const Rail& rail, const SlotHeader& arrived);
  [[nodiscard]] bool receive_credit(const Rail& rail, Immediate what);
  [[nodiscard]] bool receive_notice(const Rail& rail, Immediate what);
  [[nodiscard]] bool receive_goodbye(Rail& rail);
  [[nodiscard]] bool malformed(const std::string& what);
  void drop_output();
  void end(LinkState state, std::string reason);
  // One whose port is in trouble and has yet to tell of requests, or null.
  [[nodiscard]] Rail* silent_rail();
  // The device over which a request failed has told why.
  bool is_explained() const;
  std::string told_failure() const;
  std::string no_answer(const Device& device) const;

  const int peer_;
  const std::uint32_t rail_count_;
  std::string name_;
  std::vector<Rail> rails_;
  UniqueFd liveness_;
  std::vector<VerbsSendChannel> sends_;
  std::vector<VerbsRecvChannel> recvs_;

  // Channel numbers, one per committed segment that waits for room in the queue: a ring.
  std::array<std::uint8_t, kLineMax> line_{};
  std::size_t line_begin_ = 0;
  std::size_t line_count_ = 0;
  std::uint32_t credits_due_ = 0;  // a bit per channel

  bool granted_ = false;  // payloads may come that are placed
  Grant accepted_;        // of the peer's region; no bytes: nothing

  Notice newest_;  // from the peer
  std::uint64_t notices_received_ = 0;
  Notice outgoing_notice_;
  bool notice_waits_ = false;   // not yet posted
  bool notice_unread_ = false;  // the peer has not read the one before
  std::uint64_t notice_free_at_ = 0;
  bool notice_seen_due_ = false;

  enum class Goodbye : std::uint8_t { kNone, kWanted, kPosted };
  Goodbye goodbye_ = Goodbye::kNone;
  // The peer's are here, and the link closes when no device reads any more.
  bool goodbye_heard_ = false;

  LinkState state_ = LinkState::kOpen;
  std::string reason_;
  std::string failure_;  // of a request, not yet judged
  const Device* failed_device_ = nullptr;
  bool failed_here_ = false;  // it was not the peer that did not do its part
  Nanoseconds grace_ends_ = kForever;
  Nanoseconds silence_ends_ = kForever;  // of ports; every word of one begins it anew
  bool connected_ = false;
  bool wanted_ = false;
  bool has_let_go_ = false;
};

}  // namespace pycoll::transport::verbs
