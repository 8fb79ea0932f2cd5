// A plan is one rank's share of a schedule as a table of fixed-width rows; FORMAT.md specifies it.
// These structs have the layout of the plan bytes (little-endian, no padding), so a plan is read in
// place. Nothing here knows addresses, element counts or transports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "base/types.h"

namespace pycoll::plan {

inline constexpr std::uint32_t kMagic = 0x4c504350;  // "PCPL"
inline constexpr std::uint16_t kVersion = 3;

inline constexpr int kRecvMax = 8;
inline constexpr int kSendMax = 8;
// Only the first so many uses of a channel in a tile can be direct writes; see direct_writes.h.
inline constexpr std::uint8_t kWindowUses = 64;
// Most operands of a row: the carry, the local operand and the received segments together.
inline constexpr int kOperandsMax = 9;
inline constexpr std::uint32_t kLanesMax = 7;
// A row with this chunk is a token: it moves no bytes and only synchronizes (barriers,
// acknowledgements).
inline constexpr std::uint32_t kToken = 0xffffffff;

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint8_t collective;  // pycoll::Collective
  std::uint8_t lane_count;
  std::uint32_t size;             // ranks of the communicator
  std::uint32_t rank;             // the rank that runs these rows
  std::uint32_t root;             // 0 if the collective has no root
  std::uint32_t block_count;      // see FORMAT.md, "Chunks"
  std::uint32_t parts;            // chunks per block
  std::uint32_t temporary_count;  // chunks numbered after the data chunks, in scratch only
  std::uint32_t scratch_slots;    // segments of scratch memory that the rows use
  std::uint32_t channel_count;
  std::uint32_t row_count;
  std::uint32_t servers;      // the last ranks of `size` that hold neither input nor output
  std::uint32_t reserved[3];  // zero
  std::uint32_t checksum;     // CRC-32 (IEEE) of all bytes with this field zero
};
static_assert(sizeof(Header) == 64 && std::has_unique_object_representations_v<Header>);

enum class Direction : std::uint8_t { kRecv = 0, kSend = 1 };

struct Channel {
  std::uint32_t peer;
  std::uint16_t number;    // transport channel number, equal on both ends
  std::uint8_t direction;  // Direction
  std::uint8_t reserved;   // zero
};
static_assert(sizeof(Channel) == 8 && std::has_unique_object_representations_v<Channel>);

enum class Buffer : std::uint8_t { kNone = 0, kInput = 1, kOutput = 2, kScratch = 3 };

inline constexpr std::uint8_t kFlagFinal = 1;     // the combined value has every contribution
inline constexpr std::uint8_t kFlagFlush = 2;     // overwrites memory that was handed over
inline constexpr std::uint8_t kFlagZeroCopy = 4;  // receivers may read what the row sends in place
inline constexpr std::uint8_t kFlagDirectWrite =
    8;  // the sender may write the row's target directly
// The row sends only once its receivers have said whether they open a write window.
inline constexpr std::uint8_t kFlagAwaitWindow = 16;
// When the operation begins, the receiver tells the row's senders whether it opens a write window.
inline constexpr std::uint8_t kFlagAnnounceWindow = 32;
inline constexpr std::uint8_t kFlagsAll = 63;

// The side that copies the segments that a row sends, where both sides could: the receiver reads
// them in place, the sender writes them into the receiver's output, or both do so in turn.
enum class CopyStrategy : std::uint8_t { kReceiver = 0, kSender = 1, kSplit = 2 };

// Whether a row's local memory holds codes, and whether it encodes its result; FORMAT.md, "Codecs".
inline constexpr std::uint8_t kCodedSource = 1;  // the scratch slot of the operand holds codes
inline constexpr std::uint8_t kCodedTarget = 2;  // the scratch slot of the result gets codes
inline constexpr std::uint8_t kEncode = 4;       // the row encodes its result once
inline constexpr std::uint8_t kCodedAll = 7;

struct Row {
  std::uint32_t chunk;  // data chunk that sets the segment's bytes, or kToken
  std::uint8_t lane;
  std::uint8_t recv_count;
  std::uint8_t send_count;
  std::uint8_t flags;
  std::uint8_t source;           // Buffer of the local operand, kNone if there is none
  std::uint8_t source_position;  // position of the local operand in the fold, 0..recv_count
  std::uint8_t target;           // Buffer of the local result: kNone, kOutput or kScratch
  std::uint8_t carry;            // scratch slot of the first operand + 1, 0 if there is none
  std::uint32_t source_slot;     // chunk in input/output, slot in scratch
  std::uint32_t target_slot;
  std::uint16_t recv[kRecvMax];  // indices into the channel table, in fold order; 0xffff if unused
  std::uint16_t send[kSendMax];
  std::uint8_t copies;       // CopyStrategy
  std::uint8_t coded_recv;   // bit i: the segment of recv[i] holds codes
  std::uint8_t coded_send;   // bit i: send[i] gets codes
  std::uint8_t coded_local;  // kCodedSource, kCodedTarget, kEncode
  std::uint8_t reserved[8];  // zero
};
static_assert(sizeof(Row) == 64 && std::has_unique_object_representations_v<Row>);

constexpr int operand_count(const Row& row) {
  return row.recv_count + (row.source != 0 ? 1 : 0) + (row.carry != 0 ? 1 : 0);
}

// Whether the row reads, makes or passes on codes.
constexpr bool is_coded(const Row& row) {
  return (row.coded_recv | row.coded_send | row.coded_local) != 0;
}
// Whether the row's only operand is codes, which it passes on unchanged.
constexpr bool passes_codes(const Row& row) {
  return operand_count(row) == 1 &&
         (row.recv_count == 1 ? row.coded_recv != 0 : (row.coded_local & kCodedSource) != 0);
}

inline constexpr std::uint16_t kNoChannel = 0xffff;

// A view of plan bytes whose counts have been checked against their length.
struct Plan {
  const Header* header;
  std::span<const Channel> channels;
  std::span<const Row> rows;  // sorted by lane; within a lane in execution order
};

}  // namespace pycoll::plan
