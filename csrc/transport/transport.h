// The contract that every medium implements. One conformance suite checks it for shm, tcp, verbs
// and sim: tests/cpp/transport/conformance. Some media can do more; capabilities.h has the
// interfaces of their optional abilities.
//
//   Transport   one rank's end of one medium in one communicator; owns its links
//   Link        everything between this rank and one peer: channels both ways, notices, liveness
//   channel     an ordered, bounded, one-way queue of segments
//
// No function here starts a thread, blocks, or holds a lock for long. A channel allocates on its
// first use only. Bytes move only inside calls of the owner: reserve, commit, hand_over, peek,
// release and, for most bytes, Transport::poll.
//
// Threads: one thread at a time per Transport (the thread that drives the engine). The two ends of
// a channel belong to different ranks and share no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/clock.h"
#include "base/status.h"
#include "transport/descriptor.h"

namespace pycoll::transport {

// Channel numbers between one pair of ranks, the same in both directions. The lanes of plans use
// the numbers from zero up; the last number is for tagged send/recv.
inline constexpr std::uint32_t kChannelsMax = 8;
inline constexpr std::uint32_t kMessageChannel = kChannelsMax - 1;

// The largest payload of one segment on every transport. A constant, so that all ranks agree on it.
inline constexpr std::size_t kSegmentBytesMax = 64 * 1024;
// The number of segments that every channel can hold before its sender waits; a medium may hold
// more. At least two, so that consecutive tiles overlap.
inline constexpr std::uint32_t kChannelDepth = 4;

// Precedes every segment. `bytes` is the payload's length and may be zero.
struct SegmentHeader {
  std::uint64_t sequence =
      0;  // the operation's number within the communicator, from 1, never reset
  std::uint64_t agreement =
      0;  // hash of the sender's Descriptor; on the message channel: total bytes
  std::uint32_t bytes = 0;
  std::uint32_t tag = 0;  // user's tag on the message channel, otherwise 0

  bool operator==(const SegmentHeader&) const = default;
};
static_assert(sizeof(SegmentHeader) == 24 &&
              std::has_unique_object_representations_v<SegmentHeader>);

// The operations from `first` to `last`, both included; none if `first` is 0.
struct Numbers {
  std::uint64_t first = 0;
  std::uint64_t last = 0;

  bool contains(std::uint64_t number) const {
    return first != 0 && first <= number && number <= last;
  }
  bool operator==(const Numbers&) const = default;
};

// The operations whose arguments a rank has refused, so that it takes no part in them: the newest
// ranges, ascending, and the reason of the newest refusal.
struct Refusals {
  static constexpr std::size_t kRangesMax = 3;

  Numbers ranges[kRangesMax];
  char why[144] = {};  // NUL-terminated reason
};
static_assert(sizeof(Refusals) == 192);

// The part of a rank that disagrees with others in the search for the first array in which their
// calls differ (engine/diagnosis/dispute.h). All ranks in the same round describe the same arrays.
struct Dispute {
  static constexpr std::uint32_t kDigests = 10;

  std::uint64_t operation = 0;  // about which ranks disagree; 0: none
  std::uint32_t arrays = 0;     // number of arrays of this rank's call
  std::uint32_t round = 0;
  std::uint32_t begin = 0;  // first array of this round
  // Arrays that one digest covers. 0: the search is over, and Notice::detail describes array
  // `begin`; an empty text if no array differs.
  std::uint32_t width = 0;
  std::uint32_t digests[kDigests] = {};

  bool operator==(const Dispute&) const = default;
};
static_assert(sizeof(Dispute) == 64 && std::has_unique_object_representations_v<Dispute>);

// A rank's status, which its peers read outside the channels: its position in the order of
// operations, and the reason if it failed. A notice overwrites the previous one, so a reader sees
// only the newest. A notice with a failure is final: later posts do not replace it.
struct Notice {
  std::uint64_t sequence = 0;    // newest operation this rank has entered; 0 = none yet
  Descriptor descriptor;         // of that operation
  std::uint32_t failure = 0;     // a Code; kOk while all is well, kClosed after an orderly close
  std::int32_t culprit = -1;     // the rank at fault, or -1
  std::uint64_t completed = 0;   // all operations up to this one have succeeded on this rank
  std::uint32_t inquiry = 0;     // see Inquiry in engine/diagnosis/guilty.h
  std::uint32_t still_ms = 0;    // milliseconds since its operation moved, with an inquiry
  std::uint32_t wait_count = 0;  // peers that this rank waits for, with an inquiry
  char detail[88] = {};          // NUL-terminated text of the failure or of the dispute
  std::uint32_t waits[27] = {};  // the first of those peers: rank * 2, + 1 if it has sent something
  Dispute dispute;
  Refusals refusals;
};
static_assert(sizeof(Notice) == 512 && std::is_trivially_copyable_v<Notice>);

// The optional abilities of one end of a channel, or of a transport (capabilities.h). nullptr: the
// medium does not have the ability. Callers ask once and keep the pointers, which stay valid as
// long as the channel or the transport.
struct SendCapabilities {
  struct StoreHints* store_hints = nullptr;
  struct SourceRecord* sources = nullptr;
  struct ZeroCopySender* zero_copy = nullptr;
  struct DirectWriter* direct_writer = nullptr;
  struct Multicast* multicast = nullptr;
  struct RegionSender* regions = nullptr;
};
struct RecvCapabilities {
  struct ZeroCopyReceiver* zero_copy = nullptr;
  struct WriteWindows* windows = nullptr;
};
struct TransportCapabilities {
  struct CoreHints* core_hints = nullptr;
  struct Regions* regions = nullptr;
  struct OutputQueue* output = nullptr;
  // Arrived segments and free slots are visible in the channels without poll(), so that poll() only
  // refreshes notices and liveness. A waiting caller may then mostly look at the channels alone.
  bool shows_without_poll = false;
};

class SendChannel {
 public:
  virtual ~SendChannel() = default;

  // Returns a slot buffer for one segment of `bytes`, or nullptr while the channel is full. The
  // buffer is aligned to 64 bytes (to 16 for up to 96 bytes, which may share cache lines with their
  // header). It belongs to the caller until commit; a second call returns the same buffer.
  // Requires: bytes <= kSegmentBytesMax.
  [[nodiscard]] virtual std::byte* reserve(std::size_t bytes) = 0;

  // Publishes the reserved slot buffer as the next segment.
  // Requires: reserve(header.bytes) returned a buffer.
  virtual void commit(const SegmentHeader& header) = 0;

  // Sends header.bytes from `data`, directly where the medium can; false while the channel is full.
  // `data` must stay unchanged until drained() is true.
  [[nodiscard]] virtual bool hand_over(const SegmentHeader& header, const std::byte* data) = 0;

  // True when no handed-over or exposed memory is still being read.
  virtual bool drained() = 0;

  virtual SendCapabilities capabilities() { return {}; }
};

struct Segment {
  SegmentHeader header;
  // Aligned as in SendChannel::reserve; an exposed segment is aligned as the sender's memory is.
  // nullptr if bytes == 0 or `written_directly`.
  const std::byte* data = nullptr;
  bool exposed = false;  // a zero-copy read of the sender's memory; see ZeroCopyReceiver
  // The sender wrote the payload into this rank's write window, or into the granted part of this
  // rank's region. A payload in a region has left the medium, but a device may see it later than
  // the host; the code that reads a region on a device must order its reads itself.
  bool written_directly = false;
};

class RecvChannel {
 public:
  virtual ~RecvChannel() = default;

  // The oldest completely arrived segment, in place, or nullptr. Valid until release.
  [[nodiscard]] virtual const Segment* peek() = 0;

  // Returns the segment's slot buffer to the sender. Requires: peek() returned a segment.
  virtual void release() = 0;

  virtual RecvCapabilities capabilities() { return {}; }
};

enum class LinkState : std::uint8_t {
  kOpen,
  kClosed,  // the peer closed in good order; what it sent before can still be received
  kLost,    // the peer died or the medium broke; segments that arrived whole can still be received
};

class Link {
 public:
  virtual ~Link() = default;

  // Each call with the same number returns the same object; the first call creates it. Never fails.
  // Requires: number < kChannelsMax.
  virtual SendChannel& send_channel(std::uint32_t number) = 0;
  virtual RecvChannel& recv_channel(std::uint32_t number) = 0;

  // Makes `notice` the newest that the peer can read; best effort on a lost link.
  virtual void post(const Notice& notice) = 0;
  // Returns the peer's newest notice (all zero before the first one). Never torn.
  virtual Notice newest() = 0;

  // As of the last poll. kClosed follows a notice with kClosed; any other end is kLost.
  virtual LinkState state() = 0;
  // The reason of the loss, for users: "process 4711 on this host is gone",
  // "connection reset by 10.0.0.2:4711".
  virtual std::string reason() const = 0;
};

// What Transport::let_go() gives up.
enum class LetGo : std::uint8_t {
  // Handed-over memory, as far as that needs no wait. Everything else continues, and channels say
  // what is still being read.
  kHandedOver,
  // Handed-over and exposed memory, and all write windows. A peer that reads exposed memory, or
  // would write into a window, learns that it no longer may. Used when an operation fails. The
  // transport exposes nothing and opens no window afterwards.
  kAll,
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;  // "shm", "tcp", "verbs", "sim"

  // The link to `peer`, or nullptr when this transport does not reach it. Owned by the transport.
  virtual Link* link(int peer) = 0;

  // Moves bytes on every link without blocking and refreshes the links' states. True if anything
  // changed. A waiting operation calls it repeatedly, so an idle call must be cheap.
  virtual bool poll() = 0;
  // False if no new notice has come since the last call (or the beginning). A notice counts at the
  // latest one millisecond after it reached this host. The engine calls this after every operation,
  // so the call must be nearly free while no notice arrives.
  virtual bool has_new_notices() = 0;

  // Prepares to sleep. After arm() returned true, each of these events makes event_fd() readable: a
  // segment, notice or loss becomes visible; a slot becomes free in a channel whose reserve()
  // failed; a channel whose drained() was false becomes drained. If arm() returns false there may
  // be news already, and the caller must look again instead of sleeping. Each event is reported
  // once, by poll() or by arm(), so that a caller that waits for something else can sleep although
  // an unwanted segment is pending. Each arm() is followed by disarm(), which also makes event_fd()
  // unreadable again.
  virtual bool arm() = 0;
  virtual void disarm() = 0;
  // The descriptor to poll(2) for reading while armed; -1 for a medium on a virtual clock.
  virtual int event_fd() const = 0;

  // Stops reading memory of the caller, who may then change or free it. The transport copies unsent
  // bytes into memory of its own, as far as the medium can.
  virtual void let_go(LetGo what) = 0;

  // Closes in good order: peers see kClosed and, unless a failure came before, a closing notice.
  // Frees mappings, descriptors and buffers. Links and channels must not be used afterwards. The
  // destructor calls it, too.
  virtual void close() = 0;

  virtual TransportCapabilities capabilities() { return {}; }
};

}  // namespace pycoll::transport
