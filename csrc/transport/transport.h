// The contract that every medium implements. One conformance suite checks it for shm, tcp, verbs
// and sim: tests/cpp/transport_conformance.h.
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
#include "base/copy.h"
#include "base/status.h"
#include "base/types.h"

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

// The properties of an operation on which all ranks must agree before they exchange a byte of it.
// Fixed layout, because it is hashed, sent and compared: all padding is explicit and zero.
struct Descriptor {
  std::uint64_t count = 0;     // elements, or 0 where ranks may differ (all_gather, gather, ...)
  std::uint64_t plan_key = 0;  // hash of algorithm, tile size, user operation, shape
  std::uint32_t root = 0;
  Collective collective = Collective::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  std::uint8_t reserved = 0;

  bool operator==(const Descriptor&) const = default;
};
static_assert(sizeof(Descriptor) == 24 && std::has_unique_object_representations_v<Descriptor>);

// The shape of the caller's array as notices transmit it, for error messages only. Ranks compare
// shape_key() of the whole shape, which is a part of Descriptor::plan_key.
struct Shape {
  static constexpr std::uint32_t kShownMax = 7;

  std::uint32_t known = 0;  // 0: ranks compare no shape in this operation
  std::uint32_t axes = 0;   // `lengths` holds the first kShownMax of them
  std::uint64_t lengths[kShownMax] = {};

  static Shape of(int axes, const std::int64_t* lengths);
  bool operator==(const Shape&) const = default;
};
static_assert(sizeof(Shape) == 64 && std::has_unique_object_representations_v<Shape>);

// The contribution of an array's shape to Descriptor::plan_key, combined by exclusive or. Zero for
// one axis, because Descriptor::count already states its length.
constexpr std::uint64_t shape_key(int axes, const std::int64_t* lengths) {
  if (axes == 1) return 0;
  std::uint64_t key = 0x6a09e667f3bcc909u + static_cast<std::uint64_t>(axes);
  for (int axis = 0; axis < axes; ++axis) {
    key = (key ^ static_cast<std::uint64_t>(lengths[axis])) * 0x9e3779b97f4a7c15u;
    key ^= key >> 29;
  }
  return key;
}

// "all_reduce of 1024 float32, op sum"; for error messages.
std::string to_text(const Descriptor& descriptor);
// "(3, 2)", "(4,)", "()"; with more than kShownMax axes "(1, 2, 3, 4, 5, 6, 7, ...)".
// Requires: known.
std::string to_text(const Shape& shape);

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

// A rank's status, which its peers read outside the channels: its position in the order of
// operations, and the reason if it failed. A notice overwrites the previous one, so a reader sees
// only the newest. A notice with a failure is final: later posts do not replace it.
struct Notice {
  std::uint64_t sequence = 0;    // newest operation this rank has entered; 0 = none yet
  Descriptor descriptor;         // of that operation
  std::uint32_t failure = 0;     // a Code; kOk while all is well, kClosed after an orderly close
  std::int32_t culprit = -1;     // the rank at fault, or -1
  std::uint64_t completed = 0;   // all operations up to this one have succeeded on this rank
  std::uint32_t inquiry = 0;     // see Standing in engine/diagnosis/verdict.h
  std::uint32_t still_ms = 0;    // milliseconds since its operation moved, with an inquiry
  std::uint32_t wait_count = 0;  // peers that this rank waits for, with an inquiry
  char detail[88] = {};          // NUL-terminated text of the failure
  std::uint32_t waits[27] = {};  // the first of those peers: rank * 2, + 1 if it has sent something
  Shape shape;                   // of the caller's array in that operation
  Refusals refusals;
};
static_assert(sizeof(Notice) == 512 && std::is_trivially_copyable_v<Notice>);

// Memory that a rank registers with a transport and keeps until the transport is closed. Segments
// are sent from it and written into it in place. It may be device memory, which the host neither
// reads nor writes.
struct Region {
  std::uint64_t address = 0;  // of the first byte, in the owner's address space
  std::size_t bytes = 0;
  // A dma-buf that contains the region, or -1 if the region is at `address` in this process. The
  // caller owns the descriptor and may close it after enter() has returned.
  int descriptor = -1;
  // Of the region's first byte in the dma-buf; equals `address` modulo the page size.
  std::uint64_t offset = 0;
  bool peers_write = false;  // true: peers write into it; false: this rank only sends from it
};

// The source and the target of SendChannel::pass().
struct Passage {
  static constexpr std::uint64_t kSlotBuffer = ~std::uint64_t{0};
  const std::byte* from = nullptr;  // in this rank's region; nullptr: the reserved slot buffer
  // Offset in the memory that the peer granted; kSlotBuffer: the peer's slot buffer.
  std::uint64_t to = kSlotBuffer;
};

// A write window: memory of the receiver into which its peer writes segments of one operation
// directly, instead of into slot buffers.
struct Offer {
  std::uint64_t sequence = 0;   // of the operation
  std::uint64_t agreement = 0;  // as in SegmentHeader
  std::uint64_t uses = 0;       // bit u: the window covers use u of the channel in a tile
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
};
// The position in a write window at which a sender would put a segment.
struct DirectWrite {
  std::uint8_t use = 0;
  std::uint64_t offset = 0;
};
// Shorter payloads are never written directly: a slot buffer is as fast for them.
inline constexpr std::size_t kPlacedBytesMin = 4 * 1024;

class SendChannel {
 public:
  virtual ~SendChannel() = default;

  // Returns a slot buffer for one segment of `bytes`, or nullptr while the channel is full. The
  // buffer is aligned to 64 bytes (to 16 for up to 96 bytes, which may share cache lines with their
  // header). It belongs to the caller until commit; a second call returns the same buffer.
  // Requires: bytes <= kSegmentBytesMax.
  [[nodiscard]] virtual std::byte* reserve(std::size_t bytes) = 0;

  // Copies into the reserved slot buffer, or a part of it, with the stores that suit the medium.
  virtual void fill(std::byte* slot_buffer, const std::byte* from, std::size_t bytes) {
    copy_bytes(slot_buffer, from, bytes);
  }
  // True while ordinary stores into slot buffers are slow, as of the last reserve(). The caller
  // should then compute results elsewhere and copy them with fill().
  virtual bool wants_fill() const { return false; }

  // Publishes the reserved slot buffer as the next segment.
  // Requires: reserve(header.bytes) returned a buffer.
  virtual void commit(const SegmentHeader& header) = 0;

  // Sends header.bytes directly from `data` where the medium can; false while the channel is full.
  // `data` must stay unchanged until drained() is true. A medium without this ability copies here.
  [[nodiscard]] virtual bool hand_over(const SegmentHeader& header, const std::byte* data) {
    std::byte* slot_buffer = reserve(header.bytes);
    if (slot_buffer == nullptr) return false;
    if (header.bytes != 0) fill(slot_buffer, data, header.bytes);
    commit(header);
    return true;
  }

  // Whether the peer can read this memory in place now, and whether a zero-copy read is faster than
  // a copy. `fresh`: this rank wrote the memory a moment ago, as the results of a reduction are.
  [[nodiscard]] virtual bool is_exposable(const std::byte* data, std::size_t bytes, bool fresh) {
    (void)data, (void)bytes, (void)fresh;
    return false;
  }
  // Publishes header.bytes at `data` for a zero-copy read; false while the channel is full. `data`
  // must stay unchanged until the peer has read it: either a later message of the peer implies so,
  // or drained() is true.
  // Requires: is_exposable() has been true since this memory was allocated.
  [[nodiscard]] virtual bool expose(const SegmentHeader& header, const std::byte* data) {
    (void)header, (void)data;
    return false;
  }

  // Sends header.bytes from or into a region; false while the channel is full, and on a medium
  // without regions. The source bytes in the region must stay unchanged until reads() of them is
  // false, which on a lost link may never happen. The segment counts as handed over, but the
  // transport never copies it.
  // Requires: without `from`, reserve(header.bytes) returned a buffer; `from` lies in the region
  // that this rank entered; `to` and header.bytes lie inside the peer's grant.
  virtual bool pass(const SegmentHeader& header, const Passage& passage) {
    (void)header, (void)passage;
    return false;
  }

  // Returns the address in the peer's write window for the next segment. Returns nullptr while the
  // channel is full, if this rank cannot write there, or if it has not received the offer yet. The
  // caller fills the memory with place() and publishes it with commit_placed().
  [[nodiscard]] virtual std::byte* offered(const SegmentHeader& header,
                                           const DirectWrite& direct_write) {
    (void)header, (void)direct_write;
    return nullptr;
  }
  // Whether the peer's newest offer belongs to the operation of `header` or a later one. If true,
  // offered() cannot improve and the caller need not wait for it. True on a medium without offers.
  virtual bool answered(const SegmentHeader& header) {
    (void)header;
    return true;
  }
  // Writes the payload, or a part of it, to the address that offered() returned.
  virtual void place(std::byte* there, const std::byte* from, std::size_t bytes) {
    copy_bytes(there, from, bytes);
  }
  // Publishes the segment whose payload place() wrote.
  // Requires: offered() returned the address of this segment, which holds its payload.
  virtual void commit_placed(const SegmentHeader& header) { (void)header; }

  // True when no handed-over or exposed memory is still being read.
  virtual bool drained() { return true; }
  // True when no handed-over memory is still being read.
  virtual bool flushed() { return drained(); }
  // Whether some of [data, data + bytes) may have been handed over and may still be read. A
  // transport without a record of addresses answers for all handed-over memory.
  [[nodiscard]] virtual bool reads(const std::byte* data, std::size_t bytes) {
    (void)data, (void)bytes;
    return !flushed();
  }

  // Whether this rank and the peer may run on the same core, see Transport::share_cores(). If true,
  // dividing work between the two ranks gains nothing.
  virtual bool shares_core() const { return false; }

  // Identifies the memory that holds published payloads, if several peers read it in
  // place. Channels with equal identity can repeat each other's segments. nullptr if
  // each peer gets its own copy.
  virtual const void* memory() const { return nullptr; }

  // Sends the segment that was committed last on `other` as this channel's next segment, without
  // copying the payload; false while the channel is full. The two peers read and release it
  // independently.
  // Requires: memory() is not null and equals other.memory(); the last header on
  // `other` equals this one.
  [[nodiscard]] virtual bool repeat(const SegmentHeader& header, SendChannel& other) {
    (void)header, (void)other;
    return false;
  }
};

struct Segment {
  SegmentHeader header;
  // Aligned as in SendChannel::reserve; an exposed segment is aligned as the sender's memory is.
  // nullptr if bytes == 0 or `placed`.
  const std::byte* data = nullptr;
  bool exposed = false;  // a zero-copy read of the sender's memory; see RecvChannel::intact
  // The sender wrote the payload into this rank's write window, or into the granted part of this
  // rank's region. A payload in a region has left the medium, but a device may see it later than
  // the host; the code that reads a region on a device must order its reads itself.
  bool placed = false;
};

class RecvChannel {
 public:
  virtual ~RecvChannel() = default;

  // The oldest completely arrived segment, in place, or nullptr. Valid until release.
  [[nodiscard]] virtual const Segment* peek() = 0;

  // Lets the peer write segments of one operation into memory of this rank until the operation has
  // ended; such segments arrive with `placed` set. Only the newest offer is valid. An offer without
  // uses states that there is no write window. No effect on a medium where peers cannot write to
  // that memory.
  // Failure: an operation that fails while its offer is valid revokes it by Transport::let_go(). A
  // write that the peer has already started continues; the transport therefore keeps that memory
  // from ever being allocated again.
  virtual void offer(const Offer& offer) { (void)offer; }

  // Whether everything that was read of an exposed segment until now is what the sender sent. It
  // becomes false when the sender's operation fails, and then stays false: the caller must discard
  // what it has read.
  // Requires: peek() returned a segment.
  virtual bool intact() { return true; }

  // Returns the segment's slot buffer to the sender. Requires: peek() returned a segment.
  virtual void release() = 0;
};

enum class LinkState : std::uint8_t {
  kOpen,
  kClosed,  // the peer closed in good order; what it sent before can still be received
  kLost,    // the peer died or the medium broke; segments that arrived whole can still be received
};

class Link {
 public:
  virtual ~Link() = default;

  virtual int peer() const = 0;

  // Each call with the same number returns the same object; the first call creates it. Never fails.
  // Requires: number < kChannelsMax.
  virtual SendChannel& send_channel(std::uint32_t number) = 0;
  virtual RecvChannel& recv_channel(std::uint32_t number) = 0;

  // Makes `notice` the newest that the peer can read; best effort on a lost link.
  virtual void post(const Notice& notice) = 0;
  // Returns the peer's newest notice (all zero before the first one). Never torn.
  virtual Notice newest() = 0;

  // Returns a grant: the bytes that the peer passes to accept() before it may pass() payloads into
  // this part of this rank's region. `offset` counts from the region's first byte. The caller
  // sends the grant to the peer. Empty on a medium without regions.
  // Requires: the region was entered with peers_write and contains the range.
  virtual std::string grant(std::uint64_t offset, std::size_t bytes) {
    (void)offset, (void)bytes;
    return {};
  }
  // Fails with kInvalidArgument for a grant of another version or another link.
  virtual Status accept(const std::string& grant) {
    return Status::error(Code::kInvalidArgument, std::to_string(grant.size()) +
                                                     " bytes are no grant: there are no regions");
  }

  // As of the last poll. kClosed follows a notice with kClosed; any other end is kLost.
  virtual LinkState state() = 0;
  // The reason of the loss, for users: "process 4711 on this host is gone",
  // "connection reset by 10.0.0.2:4711".
  virtual std::string reason() const = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;  // "shm", "tcp", "verbs", "sim"

  // The link to `peer`, or nullptr when this transport does not reach it. Owned by the transport.
  virtual Link* link(int peer) = 0;

  // Whether enter() may succeed: only if devices of the medium read and write memory themselves.
  virtual bool has_regions() const { return false; }
  // Registers this rank's only region until close(). Fails with kInvalidArgument for memory that
  // cannot be a region, and with kTransport if the library, the system or the device refuses it. A
  // failed call registers nothing.
  virtual Status enter(const Region& region) {
    (void)region;
    return Status::error(Code::kTransport, std::string(name()) + " has no regions");
  }

  // States that the ranks of this transport share cores. Called once, before any channel is used.
  virtual void share_cores() {}
  // With shared cores: publishes the core on which this rank runs, and reads the core on which
  // `peer` ran last. -1 if the peer has published none.
  virtual void tell_core(int core) { (void)core; }
  virtual int core_of(int peer) {
    (void)peer;
    return -1;
  }

  // Moves bytes on every link without blocking and refreshes the links' states. True if anything
  // changed. A waiting operation calls it repeatedly, so an idle call must be cheap.
  virtual bool poll() = 0;
  // Whether outgoing bytes are pending that only poll() sends, for example because a
  // peer's buffers are full.
  virtual bool has_unsent() const { return false; }
  // False if no new notice has come since the last call (or the beginning). A notice counts at the
  // latest one millisecond after it reached this host. The engine calls this after every operation,
  // so the call must be nearly free while no notice arrives.
  virtual bool has_new_notices() { return true; }
  // False if arrived segments and free slots are visible in the channels without poll(), so that
  // poll() only refreshes notices and liveness. A waiting caller may then mostly look at the
  // channels alone.
  virtual bool carries_by_poll() const { return true; }

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

  // Stops reading handed-over memory: the transport copies unsent bytes into memory of its own, as
  // far as the medium can. Everything else continues.
  virtual void take_back() {}

  // Stops reading handed-over and exposed memory, and revokes all write windows. The transport
  // copies unsent bytes into memory of its own. A peer that reads exposed memory, or would write
  // into a write window, learns that it no longer may. Used when an operation fails, because its
  // caller may free the memory right after. The transport exposes and offers nothing afterwards.
  virtual void let_go() {}

  // Closes in good order: peers see kClosed and, unless a failure came before, a closing notice.
  // Frees mappings, descriptors and buffers. Links and channels must not be used afterwards. The
  // destructor calls it, too.
  virtual void close() = 0;
};

}  // namespace pycoll::transport
