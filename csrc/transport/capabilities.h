// The optional abilities of media, beyond the contract of transport.h. A channel or transport with
// such an ability implements its interface and returns it from capabilities().
//
// Owner, threads and failures: as for the channel or transport, which owns the interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/copy.h"
#include "base/status.h"
#include "transport/transport.h"

namespace pycoll::transport {

struct Capability {
  virtual ~Capability() = default;
};

// Shorter payloads are copied: no medium exposes them or writes them directly.
inline constexpr std::size_t kUncopiedBytesMin = 4 * 1024;

// --- abilities of a SendChannel

// Which stores suit the slot buffers of the channel.
struct StoreHints : Capability {
  // Copies into the reserved slot buffer, or a part of it.
  virtual void fill(std::byte* slot_buffer, const std::byte* from, std::size_t bytes) = 0;
  // True while ordinary stores into slot buffers are slow, as of the last reserve(). The caller
  // should then compute results elsewhere and copy them with fill().
  virtual bool wants_fill() const = 0;
};

// A record of the handed-over memory that the channel still reads. Without a record,
// SendChannel::drained() answers for all of it.
struct SourceRecord : Capability {
  // True when no handed-over memory is still being read. Exposed memory does not count.
  virtual bool flushed() = 0;
  // Whether some of [data, data + bytes) may have been handed over and may still be read.
  [[nodiscard]] virtual bool reads(const std::byte* data, std::size_t bytes) = 0;
};

// The peer reads a payload in this rank's memory. A channel with this ability has a SourceRecord,
// so that a caller who waits for handed-over memory does not wait for the peer's reads.
struct ZeroCopySender : Capability {
  // Whether the peer can read this memory in place now, and whether a zero-copy read is faster than
  // a copy. `fresh`: this rank wrote the memory a moment ago, as the results of a reduction are.
  [[nodiscard]] virtual bool is_exposable(const std::byte* data, std::size_t bytes, bool fresh) = 0;
  // Publishes header.bytes at `data` for a zero-copy read; false while the channel is full. `data`
  // must stay unchanged until the peer has read it: either a later message of the peer implies so,
  // or drained() is true.
  // Requires: is_exposable() has been true since this memory was allocated.
  [[nodiscard]] virtual bool expose(const SegmentHeader& header, const std::byte* data) = 0;
};

// The position in a write window at which a sender would put a segment.
struct DirectWrite {
  std::uint8_t use = 0;
  std::uint64_t offset = 0;
  // Whether the sender has just read the peer's memory there, so that its caches hold the lines.
  // Only the speed depends on it.
  bool cached = false;
};

// Writes payloads into the peer's write window (WriteWindow), instead of into slot buffers.
struct DirectWriter : Capability {
  // Returns the address in the peer's write window for the next segment. Returns nullptr while the
  // channel is full, if this rank cannot write there, or if it has not seen the window yet. The
  // caller fills the memory with write() and publishes it with commit_written().
  [[nodiscard]] virtual std::byte* find_window(const SegmentHeader& header,
                                               const DirectWrite& direct_write) = 0;
  // Whether the peer's newest window belongs to the operation of `header` or a later one. If true,
  // find_window() cannot improve and the caller need not wait for it.
  virtual bool is_answered(const SegmentHeader& header) = 0;
  // Writes the payload, or a part of it, to the address that find_window() returned.
  virtual void write(std::byte* there, const std::byte* from, std::size_t bytes) = 0;
  // Publishes the segment whose payload write() wrote.
  // Requires: find_window() returned the address of this segment, which holds its payload.
  virtual void commit_written(const SegmentHeader& header) = 0;
};

// One payload for several peers, which read it in the same memory.
struct Multicast : Capability {
  // Identifies the memory that holds published payloads. Channels with equal identity can repeat
  // each other's segments. Constant for the life of the channel.
  virtual const void* memory() const = 0;
  // Sends the segment that was committed last on `other` as this channel's next segment, without
  // copying the payload; false while the channel is full. The two peers read and release it
  // independently.
  // Requires: the memory() of both channels is equal; the last header on `other` equals this one.
  [[nodiscard]] virtual bool repeat(const SegmentHeader& header, SendChannel& other) = 0;
};

// The source and the target of RegionSender::pass().
struct Passage {
  static constexpr std::uint64_t kSlotBuffer = ~std::uint64_t{0};
  const std::byte* from = nullptr;  // in this rank's region; nullptr: the reserved slot buffer
  // Offset in the memory that the peer granted; kSlotBuffer: the peer's slot buffer.
  std::uint64_t to = kSlotBuffer;
};

struct RegionSender : Capability {
  // Sends header.bytes from or into a region; false while the channel is full. The source bytes in
  // the region must stay unchanged until SourceRecord::reads() of them is false, which on a lost
  // link may never happen. The segment counts as handed over, but the transport never copies it.
  // Requires: without `from`, reserve(header.bytes) returned a buffer; `from` lies in the region
  // that this rank entered; `to` and header.bytes lie inside the peer's grant.
  [[nodiscard]] virtual bool pass(const SegmentHeader& header, const Passage& passage) = 0;
};

// --- abilities of a RecvChannel

struct ZeroCopyReceiver : Capability {
  // Whether everything that was read of an exposed segment until now is what the sender sent. It
  // becomes false when the sender's operation fails, and then stays false: the caller must discard
  // what it has read.
  // Requires: peek() returned a segment.
  virtual bool intact() = 0;
};

// Memory of the receiver into which its peer writes segments of one operation directly.
struct WriteWindow {
  std::uint64_t sequence = 0;   // of the operation
  std::uint64_t agreement = 0;  // as in SegmentHeader
  std::uint64_t uses = 0;       // bit u: the window covers use u of the channel in a tile
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
};

struct WriteWindows : Capability {
  // Lets the peer write segments of one operation into memory of this rank until the operation has
  // ended; such segments arrive with `written_directly` set. Only the newest window is valid. A
  // window without uses states that there is none, as does memory into which peers cannot write.
  // Failure: an operation that fails while its window is valid revokes it by Transport::let_go(). A
  // write that the peer has already started continues; the transport therefore keeps that memory
  // from ever being allocated again.
  virtual void open_window(const WriteWindow& window) = 0;
};

// --- abilities of a Transport

// The cores on which the ranks of this transport run.
struct CoreHints : Capability {
  // States that the ranks of this transport share cores. Called once, before any channel is used.
  virtual void share_cores() = 0;
  // With shared cores: publishes the core on which this rank runs, and reads the core on which
  // `peer` ran last. -1 if the peer has published none, or if there is no link to it.
  virtual void tell_core(int core) = 0;
  virtual int core_of(int peer) = 0;
};

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

// Devices of the medium read and write memory themselves. All channels have a
// RegionSender and a SourceRecord.
struct Regions : Capability {
  // Registers this rank's only region until close(). Fails with kInvalidArgument for memory that
  // cannot be a region, and with kTransport if the library, the system or the device refuses it. A
  // failed call registers nothing.
  virtual Status enter(const Region& region) = 0;
  // Returns a grant: the bytes that `peer` passes to accept() before it may pass() payloads into
  // this part of this rank's region. `offset` counts from the region's first byte. The caller
  // sends the grant to the peer.
  // Requires: the region was entered with peers_write and contains the range; there is a link.
  virtual std::string grant(int peer, std::uint64_t offset, std::size_t bytes) = 0;
  // Accepts a grant of `peer`. Fails with kInvalidArgument for one of another version or link.
  // Requires: there is a link.
  virtual Status accept(int peer, const std::string& grant) = 0;
};

// Outgoing bytes that only poll() sends, for example because a peer's buffers are full.
struct OutputQueue : Capability {
  virtual bool has_unsent() const = 0;
};

// --- for callers: an ability, or what stands in for it

inline void fill_slot_buffer(StoreHints* hints, std::byte* slot_buffer, const std::byte* from,
                             std::size_t bytes) {
  hints != nullptr ? hints->fill(slot_buffer, from, bytes) : copy_bytes(slot_buffer, from, bytes);
}

}  // namespace pycoll::transport
