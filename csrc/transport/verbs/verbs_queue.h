// A queue pair: the messages to one peer over one rail, in order, and the receives that the peer's
// messages consume. It knows neither channels nor segments.
//
// A position is the 64-bit number of a work request, in the order posted; completions carry the
// lower 32 bits. Not every request raises a completion; one that does completes all before it.
//
// Threads: those of the Transport.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "transport/verbs/library/verbs_device.h"
#include "transport/verbs/verbs_layout.h"

namespace pycoll::transport::verbs {

// Memory of the peer outside of its area.
struct Target {
  std::uint64_t address = 0;
  std::uint32_t key = 0;
};

// Memory that this rank's device reads, and its destination in the peer's area.
struct Piece {
  const std::byte* data = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t key = 0;  // local key of the memory of `data`
  std::size_t offset = 0;
  bool by_device = false;  // the host cannot read `data`, so it is never sent inline
  std::optional<Target> target = std::nullopt;  // destination instead of `offset`
};

// Receives are posted again in batches of this size, so at most one less than a batch is missing.
inline constexpr std::uint32_t kReceiveBatch = 16;
// Most messages of a peer that may be unread on one of `rails` rails: its share of all segments, as
// many credits, two notices, one receipt of a notice and one goodbye.
constexpr std::uint32_t unread_of(std::uint32_t rails) {
  return 2 * kChannelsMax * kVerbsDepth / rails + 4;
}
// Receives to post for these messages, in whole batches.
constexpr std::uint32_t receives_of(std::uint32_t rails) {
  return static_cast<std::uint32_t>(
      round_up(unread_of(rails) + kReceiveBatch - 1, std::size_t{kReceiveBatch}));
}
static_assert(receives_of(1) == 160 && receives_of(2) == 96 && receives_of(4) == 64);

class Queue {
 public:
  // Largest number of requests under way.
  static constexpr std::uint32_t kSends = 128;
  static constexpr int kCompletionsMax = kSends + receives_of(1);
  // Pieces of one message: a header and its payload.
  static constexpr std::size_t kPiecesMax = 2;

  // `device` outlives the queue. Every completion carries `number`; see is_receive().
  Queue(const Device& device, std::uint32_t number, std::uint32_t rails);

  // Makes the queue pair and posts all receives. Called once.
  Status open();
  // The pair's part of the address for the peer; the caller adds area and rkey.
  PeerAddress address() const;
  // Makes the pair ready to send. `peer_name` names the peer in errors. Requires: open().
  Status connect(const PeerAddress& peer, const std::string& peer_name);

  // Whether one more send() fits. Requires, here and for sending: connect().
  bool has_space() const { return posted_ - completed_ + kRequestsPerSend <= kSends; }
  // Sends one message: writes the pieces contiguously into the peer's area and then delivers
  // `immediate` to the peer. Returns the position after which the memory of the pieces is free
  // again. Nothing is sent before ring(), and the pieces must stay unchanged until then. Requires:
  // has_space(); at most kPiecesMax pieces.
  std::uint64_t send(std::span<const Piece> pieces, Immediate immediate) {
    return chain(nullptr, pieces, immediate, false);
  }
  // As above, after a separate message that writes `payload` to its own destination.
  std::uint64_t send_behind(const Piece& payload, const Piece& last, Immediate immediate) {
    return chain(&payload, {&last, 1}, immediate, false);
  }
  // Sends a message without pieces that always raises a completion. When its position is done, so
  // is every earlier request.
  std::uint64_t send_last(Immediate immediate);
  // Whether the device still owes completions of requests.
  bool owes_completions() const { return completed_ < posted_ - unsignaled_; }
  bool done(std::uint64_t position) const { return completed_ >= position; }
  // Hands all sent requests to the device as one chain, which costs one doorbell, a write over the
  // bus. A refusal shows in error().
  void ring();
  // Cancels everything under way: all requests complete soon, with an error unless they were done.
  // Nothing may be sent afterwards.
  void stop();
  // errno of the first request that the device refused, or 0.
  int error() const { return error_; }

  // --- completions; the wr_id names the queue and the request
  static bool is_receive(std::uint64_t id) { return (id >> 63) != 0; }
  static std::uint32_t number_of(std::uint64_t id) {
    return static_cast<std::uint32_t>(id >> 32) & 0x7fff'ffff;
  }
  void note_send(std::uint64_t id) { completed_ += static_cast<std::uint32_t>(id - completed_); }
  void note_receive();

 private:
  static constexpr std::uint32_t kRequestsPerSend = 2;
  // Largest number of requests in one chain.
  static constexpr std::size_t kChain = 16;
  // Just below the wrap of the lower 32 bits, so that every link passes it.
  static constexpr std::uint64_t kFirstPosition = (std::uint64_t{1} << 32) - 2 * kSends;
  // Requests that read no memory raise a completion this rarely, unless the port is in trouble.
  static constexpr std::uint32_t kSignalEvery = 16;

  Status initialize();
  [[nodiscard]] bool post_receives(std::uint32_t count);
  bool is_copied(std::span<const Piece> pieces) const;
  ibv_send_wr& append(std::span<const Piece> pieces);
  std::uint64_t chain(const Piece* payload, std::span<const Piece> pieces, Immediate immediate,
                      bool signaled);

  const Device& device_;
  const std::uint32_t number_;
  const std::uint32_t receives_;
  Owned<ibv_qp> pair_;
  std::uint32_t first_packet_ = 0;
  std::uint32_t inline_max_ = 0;
  std::uint64_t peer_area_ = 0;
  std::uint32_t peer_key_ = 0;
  std::uint64_t posted_ = kFirstPosition;
  std::uint64_t completed_ = kFirstPosition;
  std::array<ibv_send_wr, kChain> requests_{};
  std::array<std::array<ibv_sge, kPiecesMax>, kChain> memory_{};
  std::size_t chained_ = 0;
  std::uint32_t unsignaled_ = 0;  // requests since the last one that raises a completion
  std::uint32_t unposted_receives_ = 0;
  int error_ = 0;
};

}  // namespace pycoll::transport::verbs
