// The connection between this rank and one peer over RDMA: rails, receive channels and their
// credits, goodbyes, and the state over all of them: open, closed or lost. A link with a failed
// rail is lost. Objects of their own hold the send channels, the notices, the grants and the watch
// of the peer.
//
// Threads: those of the Transport, which owns the link.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "transport/verbs/link/verbs_grants.h"
#include "transport/verbs/link/verbs_notices.h"
#include "transport/verbs/link/verbs_peer_watch.h"
#include "transport/verbs/link/verbs_send_channels.h"
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
  Notice newest() override { return notices_.newest(); }
  LinkState state() override { return state_; }
  std::string reason() const override { return reason_; }

  // --- for the transport
  SendChannels& sends() { return sends_; }
  const Notices& notices() const { return notices_; }
  Grants& grants() { return grants_; }
  PeerWatch& peer_watch() { return peer_watch_; }

  // A message has arrived, requests have completed, or one has failed. Returns true if the owner
  // can make progress.
  [[nodiscard]] bool take(const ibv_wc& completion);
  void fail(std::string reason);
  bool uses(const Device& device) const;
  // Posts queued output. Returns true if anything was posted.
  bool flush();
  bool has_output() const;
  // Gives up the rails over which devices read user memory; an open link is then lost. Requires:
  // sends().reads_user_memory().
  void stop();

  // Closes in good order: posts a closing notice, unless a failure came before, and a goodbye after
  // all output.
  void say_goodbye();
  // Whether the peer has received the goodbye, or cannot receive it any more.
  bool goodbye_is_done() const;

 private:
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
  void post_goodbyes();
  void post_last_notice();
  [[nodiscard]] bool post_one();
  [[nodiscard]] bool note_sent(Rail& rail, std::uint64_t id);
  [[nodiscard]] bool receive(Rail& rail, Immediate what, std::uint32_t bytes);
  [[nodiscard]] bool receive_segment(Rail& rail, Immediate what, std::uint32_t bytes);
  [[nodiscard]] bool accept_released(const Rail& rail, const SlotHeader& arrived);
  [[nodiscard]] bool receive_credit(const Rail& rail, Immediate what);
  [[nodiscard]] bool receive_notice(const Rail& rail, Immediate what);
  [[nodiscard]] bool receive_goodbye(Rail& rail);
  [[nodiscard]] bool fail_malformed(const std::string& what);
  void drop_output();
  void end(LinkState state, std::string reason);

  const int peer_;
  const std::uint32_t rail_count_;
  std::string name_;
  SendChannels sends_;
  std::vector<VerbsRecvChannel> recvs_;
  std::uint32_t credits_due_ = 0;  // one bit per channel
  Notices notices_;
  Grants grants_;
  PeerWatch peer_watch_;

  enum class Goodbye : std::uint8_t { kNone, kWanted, kPosted };
  Goodbye goodbye_ = Goodbye::kNone;
  // All goodbyes of the peer have arrived. The link closes once no device reads user memory.
  bool goodbye_received_ = false;

  LinkState state_ = LinkState::kOpen;
  std::string reason_;
  bool connected_ = false;
};

}  // namespace pycoll::transport::verbs
