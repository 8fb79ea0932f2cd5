// The contract of every medium. One conformance suite (tests/cpp/transport_conformance.h)
// runs against shm, tcp, verbs and sim; what is written here is what it checks.
//
//   Transport   one rank's end of one medium in one communicator; owns its links
//   Link        everything between this rank and one peer: channels both ways, notices, liveness
//   channel     an ordered, bounded, one-way lane of segments
//
// Nothing here starts a thread, takes a lock for long, blocks, or allocates after a channel's first
// use. Bytes move only inside calls made by the owner: reserve, commit, hand_over, peek, release,
// and above all Transport::poll. Threads: one thread at a time per Transport (the engine's driver);
// the two ends of a channel live in different ranks and need no common lock.
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

// Channel numbers between one pair of ranks, the same in both directions. Plans use the lanes from
// zero up; the last number carries tagged send/recv.
inline constexpr std::uint32_t kChannelsMax = 8;
inline constexpr std::uint32_t kMessageChannel = kChannelsMax - 1;

// The largest payload of one segment on every transport; agreed by all ranks, so a constant.
inline constexpr std::size_t kSegmentBytesMax = 64 * 1024;
// Segments a channel holds at least before its sender must wait; media may hold more. At least two,
// so that tiles overlap.
inline constexpr std::uint32_t kChannelDepth = 4;

// What ranks must agree on before they exchange a byte of an operation. Fixed layout: it is hashed,
// sent and compared. All padding is explicit and zero.
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

// The shape of the caller's array, as far as notices tell it: for error messages. What ranks
// compare is the key of the whole shape, which is a part of Descriptor::plan_key.
struct Shape {
  static constexpr std::uint32_t kShownMax = 7;

  std::uint32_t known = 0;  // 0: ranks compare no shape in this operation
  std::uint32_t axes = 0;   // of which the first kShownMax have their lengths here
  std::uint64_t lengths[kShownMax] = {};

  static Shape of(int axes, const std::int64_t* lengths);
  bool operator==(const Shape&) const = default;
};
static_assert(sizeof(Shape) == 64 && std::has_unique_object_representations_v<Shape>);

// What the shape of an array adds to Descriptor::plan_key, by exclusive or. With one axis the count
// tells it, so that nothing is added.
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
// "(3, 2)", "(4,)", "()"; of more axes than it has "(1, 2, 3, 4, 5, 6, 7, ...)". Requires: known.
std::string to_text(const Shape& shape);

// Rides in front of every segment. `bytes` is the payload's length and may be zero.
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

// Operations from `first` to `last`; none where `first` is 0.
struct Numbers {
  std::uint64_t first = 0;
  std::uint64_t last = 0;

  bool contains(std::uint64_t number) const {
    return first != 0 && first <= number && number <= last;
  }
  bool operator==(const Numbers&) const = default;
};

// Operations whose arguments a rank has refused, so that it takes no part in them: the newest
// ranges, ascending, and why it refused the last one of all.
struct Refusals {
  static constexpr std::size_t kRangesMax = 3;

  Numbers ranges[kRangesMax];
  char why[144] = {};  // NUL-terminated text
};
static_assert(sizeof(Refusals) == 192);

// What a rank tells its peers outside the channels: where it is, and why it gave up if it did.
// Overwriting, not queued: a reader sees the newest one. A notice with a failure is final: later
// posts do not replace it.
struct Notice {
  std::uint64_t sequence = 0;   // newest operation this rank has entered; 0 = none yet
  Descriptor descriptor;        // of that operation
  std::uint32_t failure = 0;    // a Code; kOk while all is well, kClosed after an orderly close
  std::int32_t culprit = -1;    // the rank at fault, or -1
  std::uint64_t completed = 0;  // newest operation that has ended well on this rank; all before too
  std::uint32_t inquiry = 0;    // see Standing in runtime/verdict.h
  std::uint32_t still_ms = 0;   // milliseconds since its operation moved, with an inquiry
  std::uint32_t awaited_count = 0;  // peers that this rank waits for, with an inquiry
  char detail[88] = {};             // NUL-terminated text: how it failed
  std::uint32_t awaited[27] = {};   // the first of those: rank * 2, + 1 if it has sent something
  Shape shape;                      // of the caller's array in that operation
  Refusals refusals;
};
static_assert(sizeof(Notice) == 512 && std::is_trivially_copyable_v<Notice>);

// Memory that its owner names, and keeps until the transport is closed: segments are sent from it
// and arrive in it where it lies. It may be a device's, so that the host neither reads nor writes
// it.
struct Region {
  std::uint64_t address = 0;  // of the first byte, as the owner counts; see also `descriptor`
  std::size_t bytes = 0;
  // Of a dma-buf that holds it, the caller's, who may close it once the region is entered; -1: it
  // is what lies at `address` in this process.
  int descriptor = -1;
  std::uint64_t offset =
      0;  // of the first byte in the dma-buf; lies in its page where `address` does
  bool peers_write = false;  // segments arrive there; otherwise they are only sent from it
};

// Where the payload of SendChannel::pass() comes from and goes to.
struct Passage {
  static constexpr std::uint64_t kRoom = ~std::uint64_t{0};
  const std::byte* from = nullptr;  // in this rank's region; nullptr: the room that is reserved
  std::uint64_t to = kRoom;  // so far into what the peer granted; kRoom: the peer's room, as ever
};

// What a receiver lets its peer write by itself in one operation, instead of into rooms.
struct Offer {
  std::uint64_t sequence = 0;   // of the operation
  std::uint64_t agreement = 0;  // as in SegmentHeader
  std::uint64_t uses = 0;       // bit u: what comes as use u of the channel in a tile
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
};
// Where in that memory a sender would put a segment.
struct Landing {
  std::uint8_t use = 0;
  std::uint64_t offset = 0;
};
// Shorter payloads are never put there: a line of their own carries them as quickly.
inline constexpr std::size_t kPlacedBytesMin = 4 * 1024;

class SendChannel {
 public:
  virtual ~SendChannel() = default;

  // Room for one segment of `bytes`, or nullptr while the channel is full. The room is aligned to
  // 64 bytes (16 for up to 96 bytes, which may travel beside their header), belongs to the caller
  // until commit, and is the same if asked twice.
  // Requires: bytes <= kSegmentBytesMax.
  [[nodiscard]] virtual std::byte* reserve(std::size_t bytes) = 0;

  // Copies into reserved room, or a part of it, with the stores that suit the medium.
  virtual void fill(std::byte* room, const std::byte* from, std::size_t bytes) {
    copy_bytes(room, from, bytes);
  }
  // True while ordinary stores into rooms are slow: results had better be made elsewhere and then
  // copied by fill(). As of the last reserve().
  virtual bool wants_fill() const { return false; }

  // Publishes the reserved room as the next segment. Requires: reserve(header.bytes) gave room.
  virtual void commit(const SegmentHeader& header) = 0;

  // Sends header.bytes straight from `data` where the medium can; false while the channel is full.
  // `data` must stay unchanged until drained() says true. A medium that copies anyway copies here.
  [[nodiscard]] virtual bool hand_over(const SegmentHeader& header, const std::byte* data) {
    std::byte* room = reserve(header.bytes);
    if (room == nullptr) return false;
    if (header.bytes != 0) fill(room, data, header.bytes);
    commit(header);
    return true;
  }

  // Whether the peer can read this memory where it lies, and that is worthwhile, now; `fresh` if it
  // was written a moment ago, as what is reduced again and again is.
  [[nodiscard]] virtual bool lendable(const std::byte* data, std::size_t bytes, bool fresh) {
    (void)data, (void)bytes, (void)fresh;
    return false;
  }
  // Sends header.bytes for the peer to read at `data`; false while the channel is full. `data` must
  // stay unchanged until the peer has read it: by what the peer sends later, or by drained().
  // Requires: lendable() has said so since this memory exists.
  [[nodiscard]] virtual bool lend(const SegmentHeader& header, const std::byte* data) {
    (void)header, (void)data;
    return false;
  }

  // Sends header.bytes where at least one end lies in a region; false while the channel is full,
  // and on media without regions. What comes from the region must stay unchanged until reads() of
  // it is false; of a lost link that may be never. Counts as handed over, but is never copied.
  // Requires: without `from`, reserve(header.bytes) gave room; `from` lies in the region that this
  // rank entered, `to` and header.bytes in what the peer's grant lets it write.
  virtual bool pass(const SegmentHeader& header, const Passage& passage) {
    (void)header, (void)passage;
    return false;
  }

  // Where the peer offers to have the next segment put, as far as this rank can write there and
  // knows of the offer yet; else, and while the channel is full, nullptr. To be filled by place(),
  // and published by commit_placed().
  [[nodiscard]] virtual std::byte* offered(const SegmentHeader& header, const Landing& landing) {
    (void)header, (void)landing;
    return nullptr;
  }
  // Whether the peer's last word on offers is of the operation of `header`, or a later one: then
  // nothing is won by waiting until offered() says more. True on media without offers.
  virtual bool answered(const SegmentHeader& header) {
    (void)header;
    return true;
  }
  virtual void place(std::byte* there, const std::byte* from, std::size_t bytes) {
    copy_bytes(there, from, bytes);
  }
  // Requires: offered() named the place of this segment, which holds its payload.
  virtual void commit_placed(const SegmentHeader& header) { (void)header; }

  // True when no memory that was handed over or lent is still being read.
  virtual bool drained() { return true; }
  // The same of memory that was handed over only.
  virtual bool flushed() { return drained(); }
  // Whether some of [data, data + bytes) may have been handed over and still be read. Where that is
  // not known, all that was handed over counts.
  [[nodiscard]] virtual bool reads(const std::byte* data, std::size_t bytes) {
    (void)data, (void)bytes;
    return !flushed();
  }

  // Whether this rank and the peer may run on the same core, see Transport::share_cores(): then
  // nothing is won by dividing work that either could do alone.
  virtual bool shares_core() const { return false; }

  // Names the memory that payloads are published in, if several peers read it in place: channels
  // with the same one can repeat each other's segments. nullptr where each peer gets its own copy.
  virtual const void* memory() const { return nullptr; }

  // Sends what was committed last on `other`, as this channel's next segment, without copying the
  // payload; false while the channel is full. The two peers read and release independently.
  // Requires: memory() is not null and that of `other`, whose last header was this one.
  [[nodiscard]] virtual bool repeat(const SegmentHeader& header, SendChannel& other) {
    (void)header, (void)other;
    return false;
  }
};

struct Segment {
  SegmentHeader header;
  // Aligned as in SendChannel::reserve unless lent, and then as the sender's memory is; nullptr if
  // bytes == 0 or placed.
  const std::byte* data = nullptr;
  bool lent = false;  // see RecvChannel::intact
  // The sender put the payload where this rank offered, or in what it was granted of this rank's
  // region. Into a region it has left the medium, but others than the host may see it later:
  // whoever reads the region knows how to wait.
  bool placed = false;
};

class RecvChannel {
 public:
  virtual ~RecvChannel() = default;

  // The oldest segment that has arrived whole, in place, or nullptr. Valid until release.
  [[nodiscard]] virtual const Segment* peek() = 0;

  // Lets the peer put segments of an operation into memory of this rank from now on, until the
  // operation has ended: segments that are `placed` tell of it. Only the newest offer stands;
  // without uses it says that there is none. Of
  // media where peers cannot write to that memory, nothing happens. An operation that fails with
  // its offer standing ends it by Transport::let_go(), but for what a peer is writing just then:
  // the transport keeps such memory from ever being given to somebody else.
  virtual void offer(const Offer& offer) { (void)offer; }

  // Whether all that was read of a lent segment until now is what was sent. Once false, as when the
  // sender's operation has failed, it stays false, and what was read must not be used.
  // Requires: peek() gave a segment.
  virtual bool intact() { return true; }

  // Gives the segment's room back to the sender. Requires: peek() gave a segment.
  virtual void release() = 0;
};

enum class LinkState : std::uint8_t {
  kOpen,
  kClosed,  // the peer closed in good order; what it sent before can still be received
  kLost,    // the peer died or the medium broke; what had arrived whole can still be received
};

class Link {
 public:
  virtual ~Link() = default;

  virtual int peer() const = 0;

  // The same object at every call with the same number; made on first use. Never fails.
  // Requires: number < kChannelsMax.
  virtual SendChannel& send_channel(std::uint32_t number) = 0;
  virtual RecvChannel& recv_channel(std::uint32_t number) = 0;

  // Makes `notice` the newest that the peer can read; best effort on a lost link.
  virtual void post(const Notice& notice) = 0;
  // The peer's newest notice (all zero before its first). Never torn.
  virtual Notice newest() = 0;

  // What the peer's accept() wants, so that it may pass() payloads to these bytes of this rank's
  // region, counted from its beginning; the caller brings it there. Empty on media without regions.
  // Requires: the region was entered with peers_write, and holds them.
  virtual std::string grant(std::uint64_t offset, std::size_t bytes) {
    (void)offset, (void)bytes;
    return {};
  }
  // kInvalidArgument for what is no grant of this version, or of another link.
  virtual Status accept(const std::string& grant) {
    return Status::error(Code::kInvalidArgument, std::to_string(grant.size()) +
                                                     " bytes are no grant: there are no regions");
  }

  // As of the last poll. kClosed follows a notice with kClosed; kLost anything less orderly.
  virtual LinkState state() = 0;
  // Why the link is lost, for users: "process 4711 was killed", "connection reset
  // by 10.0.0.2:4711".
  virtual std::string reason() const = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;  // "shm", "tcp", "verbs", "sim"

  // The link to `peer`, or nullptr when this transport does not reach it. Owned by the transport.
  virtual Link* link(int peer) = 0;

  // Whether enter() may succeed: devices of the medium read and write memory by themselves.
  virtual bool has_regions() const { return false; }
  // Registers this rank's region, of which there is one at most, until close(). kInvalidArgument
  // for what cannot be one; kTransport where library, system or device refuse: then there is none.
  virtual Status enter(const Region& region) {
    (void)region;
    return Status::error(Code::kTransport, std::string(name()) + " has no regions");
  }

  // Ranks that it reaches have to share cores. Told once, before any channel is used.
  virtual void share_cores() {}
  // Where they do, this rank tells on which core it runs, and hears where `peer` ran last; -1 if
  // that was not told.
  virtual void tell_core(int core) { (void)core; }
  virtual int core_of(int peer) {
    (void)peer;
    return -1;
  }

  // Moves what can be moved on every link without blocking and refreshes their states. True if
  // anything changed. Called again and again while an operation waits, so cheap when idle.
  virtual bool poll() = 0;
  // Whether something waits to leave that only poll() sends, as while a peer takes nothing.
  virtual bool has_unsent() const { return false; }
  // False if no peer has posted a notice since this last said so, or since the beginning, that
  // reached this host a millisecond ago. Asked behind every operation, so nearly free while no
  // notice comes.
  virtual bool has_new_notices() { return true; }
  // False if segments and room show in the channels by themselves, so that poll() only tells of
  // peers: then who waits may look at channels alone, most of the time.
  virtual bool carries_by_poll() const { return true; }

  // Going to sleep: after arm() returned true, any segment, notice or loss that becomes visible,
  // and room in a channel whose reserve() failed or whose drained() was false, makes event_fd()
  // readable. False means there may be news already: look again instead of sleeping. News is told
  // once, by poll() or by arm(), so that who waits for something else can sleep beside a segment
  // that nobody wants. Each arm() is followed by disarm(), which also makes the descriptor quiet
  // again.
  virtual bool arm() = 0;
  virtual void disarm() = 0;
  // Descriptor to poll(2) for reading while armed; -1 for a medium on a virtual clock.
  virtual int event_fd() const = 0;

  // Stops reading memory that was handed over: what is still to be sent is copied to memory of the
  // transport's own, as far as the medium can. Everything else goes on.
  virtual void take_back() {}

  // Stops reading memory that was handed over or lent, and ends offers: what is still to be sent
  // is copied to memory of the transport's own, and who reads what was lent, or would write to
  // what was offered, learns that it no longer may. For
  // operations that fail: their owner may free the memory right after. Nothing is lent or offered
  // afterwards.
  virtual void let_go() {}

  // Orderly: peers see kClosed, and a closing notice unless a failure came before. Frees mappings,
  // descriptors and buffers. Links and channels must not be used afterwards. Also
  // done by the destructor.
  virtual void close() = 0;
};

}  // namespace pycoll::transport
