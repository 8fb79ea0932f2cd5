// The connection between this rank and one peer over RDMA: rails, channels, notices, and the state
// over all of them: open, closed or lost. A link with a failed rail is lost.
//
// Threads: those of the Transport, which owns the link.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "transport/verbs/verbs_channel.h"
#include "transport/verbs/verbs_rail.h"

namespace pycoll::transport::verbs {

class VerbsLink final : public Link, private ChannelOwner {
 public:
  // Makes one rail over each of `ports`, which outlive the link. Requires: is_rail_count().
  VerbsLink(const std::vector<OpenPort*>& ports, int peer);

  // Makes queue pairs and areas; `address` receives the bytes for the peer's connect(). Called
  // once.
  Status prepare(std::string* address);
  // As VerbsTransport::attach. Called once, after prepare().
  Status connect(const std::string& address, UniqueFd liveness, std::string name);
  bool is_connected() const { return connected_; }

  SendChannel& send_channel(std::uint32_t number) override;
  RecvChannel& recv_channel(std::uint32_t number) override;
  void post(const Notice& notice) override;
  Notice newest() override { return newest_; }
  std::uint64_t notice_count() const { return notices_received_; }
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // --- for the transport
  // As Regions::grant and Regions::accept.
  std::string grant(std::uint64_t offset, std::size_t bytes);
  Status accept(const std::string& grant);
  // A message has arrived on rail `index`, or requests have completed. Returns true if the owner
  // can make progress.
  [[nodiscard]] bool handle_receive(std::uint32_t index, std::uint32_t immediate,
                                    std::uint32_t bytes);
  [[nodiscard]] bool handle_send(std::uint32_t index, std::uint64_t id);
  // A send or receive request has failed. judge() decides what follows, after all earlier
  // completions have been taken: the peer may have closed in good order on another device.
  void handle_failure(std::uint32_t index, const ibv_wc& completion);
  // Ends the link after a failed request. If this rank's own device gave up, the link first gives
  // it a grace period to report the reason.
  void judge(Nanoseconds now);
  void fail(std::string reason);
  bool uses(const Device& device) const;
  // Posts queued output. Returns true if anything was posted.
  bool flush();
  bool has_output() const;
  int liveness_fd() const { return liveness_.get(); }
  // The liveness socket is readable. Returns true if it has ended or failed; the caller then drops
  // it.
  bool read_liveness(Nanoseconds now);
  void drop_liveness() { liveness_.reset(); }
  // Stops sending from user memory. Requests that the device already has complete when the peer
  // answers, or by stop().
  void let_go();
  // Whether the device may be reading user memory.
  bool reads_user_memory();
  // Gives up the rails over which devices read user memory; an open link is then lost. Requires:
  // reads_user_memory().
  void stop();
  // Called periodically. A port in trouble that reports no more completions starts a grace period
  // too.
  void watch_ports(Nanoseconds now);
  // End of the wait for a goodbye or for a report of a device; kForever if the link waits for
  // neither.
  Nanoseconds grace_ends() const { return std::min(grace_ends_, silence_ends_); }
  // Whether the wait has ended, or the device has reported. Requires, here and for end_grace(): the
  // link waits for one of them.
  bool grace_is_over(Nanoseconds now) const;
  void end_grace();

  // Closes in good order: posts a closing notice, unless a failure came before, and a goodbye after
  // all output.
  void say_goodbye();
  // Whether the peer has received the goodbye, or cannot receive it any more.
  bool goodbye_is_done() const;

 private:
  static constexpr std::size_t kLineMax = kChannelsMax * kVerbsDepth;

  void submit(std::uint32_t number) override;
  void credit_due(std::uint32_t number, bool now) override;
  bool accept_address(const std::string& text, std::array<PeerAddress, kRailsMax>* peers) const;
  bool has_space();
  void post_segment(VerbsSendChannel& channel);
  // Whether the rail carries the counts of the channel.
  bool carries_credits(const Rail& rail, std::uint32_t number) const;
  // Whether counts that the rail carries are due to the peer.
  bool owes_credits(const Rail& rail) const;
  void write_credits(const Rail& rail, SlotHeader* header);
  Piece payload_of(const VerbsSendChannel::Route& route, const Rail& rail,
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
  [[nodiscard]] bool fail_malformed(const std::string& what);
  void drop_output();
  void end(LinkState state, std::string reason);
  // A rail whose port is in trouble and still owes completions, or nullptr.
  [[nodiscard]] Rail* silent_rail();
  // Whether the device of the failed request has reported a reason.
  bool is_explained() const;
  std::string failure_text() const;
  std::string no_answer(const Device& device) const;

  const int peer_;
  const std::uint32_t rail_count_;
  std::string name_;
  UniqueFd liveness_;
  std::vector<VerbsSendChannel> sends_;
  std::vector<VerbsRecvChannel> recvs_;

  // A ring of channel numbers, one per committed segment that waits for space in a queue.
  std::array<std::uint8_t, kLineMax> line_{};
  std::size_t line_begin_ = 0;
  std::size_t line_count_ = 0;
  std::uint32_t credits_due_ = 0;  // one bit per channel

  bool granted_ = false;  // the peer may write payloads to this rank's region
  Grant accepted_;        // from the peer; 0 bytes: none was accepted

  Notice newest_;  // from the peer
  std::uint64_t notices_received_ = 0;
  Notice outgoing_notice_;
  bool notice_waits_ = false;   // not posted yet
  bool notice_unread_ = false;  // the peer has not read the previous notice
  std::uint64_t notice_free_at_ = 0;
  bool notice_seen_due_ = false;

  enum class Goodbye : std::uint8_t { kNone, kWanted, kPosted };
  Goodbye goodbye_ = Goodbye::kNone;
  // All goodbyes of the peer have arrived. The link closes once no device reads user memory.
  bool goodbye_received_ = false;

  LinkState state_ = LinkState::kOpen;
  std::string reason_;
  std::string failure_;  // of a request, before judge()
  const Device* failed_device_ = nullptr;
  bool failed_here_ = false;  // the local device failed, not the peer
  Nanoseconds grace_ends_ = kForever;
  Nanoseconds silence_ends_ = kForever;  // of ports; every completion restarts the wait
  bool connected_ = false;
};

}  // namespace pycoll::transport::verbs
