// A queue pair: what is written to one peer over one rail, in order, and the receives that the
// peer's messages consume. Knows neither channels nor segments.
//
// Positions count work requests without end; completions carry their lower 32 bits. Not every
// request tells that it is done; one that does tells it for all before it.
//
// Threads: those of the Transport.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "transport/verbs_device.h"
#include "transport/verbs_layout.h"

namespace pycoll::transport::verbs {

// Memory of the peer's outside of its area.
struct Target {
  std::uint64_t address = 0;
  std::uint32_t key = 0;
};

// Memory that this rank's device reads, and where in the peer's area it goes.
struct Piece {
  const std::byte* data = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t key = 0;  // of the registered memory that `data` lies in
  std::size_t offset = 0;
  bool by_device = false;  // the host cannot read it, so that it never goes into a request
  std::optional<Target> target = std::nullopt;  // it goes there instead
};

// Receives are posted again in batches, so that almost one batch may be missing.
inline constexpr std::uint32_t kReceiveBatch = 16;
// What a peer may send unread over one of so many rails: its share of all segments, as many
// credits, two notices, a notice seen and a goodbye.
constexpr std::uint32_t unread_of(std::uint32_t rails) {
  return 2 * kChannelsMax * kVerbsDepth / rails + 4;
}
// Receives that serve it, in whole batches.
constexpr std::uint32_t receives_of(std::uint32_t rails) {
  return static_cast<std::uint32_t>(
      round_up(unread_of(rails) + kReceiveBatch - 1, std::size_t{kReceiveBatch}));
}
static_assert(receives_of(1) == 160 && receives_of(2) == 96 && receives_of(4) == 64);

class Queue {
 public:
  // Requests that can be under way.
  static constexpr std::uint32_t kSends = 128;
  static constexpr int kCompletionsMax = kSends + receives_of(1);
  // Of one message: a header here and its payload there.
  static constexpr std::size_t kPiecesMax = 2;

  // `device` outlives the queue. `number` comes back with every completion; see is_receive().
  Queue(const Device& device, std::uint32_t number, std::uint32_t rails);

  // Makes the pair and posts all receives. Called once.
  Status open();
  // What the peer must know about the pair; area and rkey are the caller's to add.
  PeerAddress address() const;
  // Makes the pair ready to send. `who` names the peer in errors. Requires: open().
  Status connect(const PeerAddress& peer, const std::string& who);

  // Whether one more send() fits. Requires for this and for sending: connect().
  bool has_room() const { return posted_ - completed_ + kRequestsPerSend <= kSends; }
  // One message: writes the pieces, which follow each other in the peer's area, and once all of it
  // is there the peer is told `immediate`. Returns the position with which the memory of the pieces
  // is free again. Nothing leaves before ring(), and until then the pieces stay as they are.
  // Requires: has_room(); at most kPiecesMax pieces.
  std::uint64_t send(std::span<const Piece> pieces, Immediate immediate) {
    return chain(nullptr, pieces, immediate, false);
  }
  // As above, behind a message of its own that writes `payload`, wherever that goes.
  std::uint64_t send_behind(const Piece& payload, const Piece& last, Immediate immediate) {
    return chain(&payload, {&last, 1}, immediate, false);
  }
  // As send() of nothing; when its position is done, so is everything before.
  std::uint64_t send_last(Immediate immediate);
  // The device has yet to tell that requests are done, or have failed.
  bool awaits_word() const { return completed_ < posted_ - untold_; }
  bool done(std::uint64_t position) const { return completed_ >= position; }
  // Hands everything that was sent to the device, as one chain: it costs one doorbell, a write over
  // the bus. A refusal shows in error().
  void ring();
  // Ends everything that is under way: all requests complete soon, with an error unless they were
  // done. Nothing may be sent afterwards.
  void stop();
  // errno of the request that the device refused, or 0.
  int error() const { return error_; }

  // --- completions; their wr_id says what they belong to
  static bool is_receive(std::uint64_t id) { return (id >> 63) != 0; }
  static std::uint32_t number_of(std::uint64_t id) {
    return static_cast<std::uint32_t>(id >> 32) & 0x7fff'ffff;
  }
  void sent(std::uint64_t id) { completed_ += static_cast<std::uint32_t>(id - completed_); }
  void received();

 private:
  static constexpr std::uint32_t kRequestsPerSend = 2;
  // Requests in one chain at most.
  static constexpr std::size_t kChain = 16;
  // Just below where the lower 32 bits begin anew, so that every link gets there.
  static constexpr std::uint64_t kFirstPosition = (std::uint64_t{1} << 32) - 2 * kSends;
  // Requests that need no memory tell of themselves this rarely, unless the port is in trouble.
  static constexpr std::uint32_t kTellEvery = 16;

  Status initialize();
  [[nodiscard]] bool post_receives(std::uint32_t count);
  bool is_copied(std::span<const Piece> pieces) const;
  ibv_send_wr& append(std::span<const Piece> pieces);
  std::uint64_t chain(const Piece* payload, std::span<const Piece> pieces, Immediate immediate,
                      bool tell);

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
  std::uint32_t untold_ = 0;  // requests since one that tells
  std::uint32_t unposted_receives_ = 0;
  int error_ = 0;
};

}  // namespace pycoll::transport::verbs
