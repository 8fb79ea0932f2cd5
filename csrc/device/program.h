// What a kernel walks: the rows of a validated plan as they are, joined with this rank's counts,
// channels and memory. Host and device read the same structs.
//
//   share   a grid runs the whole plan `shares` times side by side, each time on one part of every
//           chunk and over channels of its own; a block runs one lane of one share, so that blocks
//           never wait for blocks of their own rank
//   port    one end of a channel of one share in one protocol
//
// Ranks agree on shares, protocol and segment length, as they do on the plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "device/pack.h"
#include "plan/plan.h"

namespace pycoll::device {

// How bytes cross peer memory; see protocols.h. The values index tables.
enum class Protocol : std::uint8_t { kLl = 0, kLl128 = 1, kSimple = 2, kPattern = 3 };
inline constexpr std::uint32_t kProtocolCount = 4;

// Segments that a channel holds, as many as those of transports: plans are proved with this bound.
inline constexpr std::uint32_t kDepth = 4;

// Shares of a chunk begin at multiples of this many bytes, so that only a chunk's ends are ragged.
inline constexpr std::uint32_t kGranuleBytes = 128;

inline constexpr std::uint32_t kThreadsMax = 512;

// A header holds a hash of what ranks agree on, and in its low bits the segment's bytes: whoever
// carries the segment knows nothing else of it.
inline constexpr std::uint64_t kLengthMask = (std::uint64_t{1} << 17) - 1;
// And the bit above says that the segment is not in its slot but where it belongs; see Offer.
inline constexpr std::uint64_t kLanded = kLengthMask + 1;

// Memory of the caller that peers may write to: arrays of all ranks under one number, of each rank
// as a rank's kernels see it. Nothing: both are zero.
struct alignas(kPackBytes) Registered {
  std::byte* memory;
  std::uint64_t bytes;
};
// Numbers of a communicator.
inline constexpr std::uint32_t kRegisteredMax = 64;
inline constexpr std::uint64_t kNotRegistered = ~std::uint64_t{0};

// What a receiver tells the sender of a channel when a launch of its own begins, if its output is
// registered: what it would only copy from a slot to there, the sender may write there at once. It
// lies behind the credit, is valid for the launch of both ends that began with this step, and
// nobody waits for it. Written once per launch, `begun` last.
struct Offer {
  std::uint64_t begun;   // 1 + the channel's step
  std::uint64_t uses;    // as plan::Landings::offered
  std::uint64_t number;  // of the registered memory
  std::uint64_t offset;  // of the output in it
  std::uint64_t bytes;   // of the output
  std::uint64_t agreement;
};

// What a lane does for a channel before its first row.
struct Landing {
  std::uint64_t uses;  // to be offered by the receiver; none where it is the sender
  std::uint32_t lane;
  std::uint32_t reserved;
};

// One end of a channel, in its own rank's device memory; the other rank's end mirrors it. Slots and
// headers lie with the receiver, the credit with the sender: everybody polls its own memory.
//
//   sender                                       receiver
//   waits until *credit + kDepth > step
//   writes slots[step % kDepth], then the
//   header with flag step + 1             --->   waits for header and data with that flag
//   ++step                                       reads, then *credit = ++step
//
// Counts only grow, from launch to launch: a captured launch can be replayed.
struct Port {
  std::byte* slots;       // kDepth of Program::slot_stride bytes, aligned to kGranuleBytes
  Pack* headers;          // kDepth
  std::uint64_t* credit;  // segments that the receiver has given back
  Offer* offer;           // of the receiver; nullptr where the host carries
  std::uint64_t step;     // segments through this end; only the block that owns it touches it
  std::uint64_t begun;    // 1 + the step when a launch began; that block's too
  std::uint32_t peer;
  std::uint32_t reserved;
};

// What Control::stop says when a kernel found a segment of another operation: Code::kMismatch, by
// number, since kernels do not see Status.
inline constexpr std::uint32_t kStopMismatch = 2;

// What host and kernels tell each other while kernels run; in memory that both reach. Behind it
// lies one word per rank, nonzero if a wait for that rank was given up, and one per block, its
// beat: a block adds one when it begins and one when it ends, so that it is odd while the block
// runs. The host sees so what runs and for how long, also what a graph replays that it knows
// nothing of.
struct Control {
  std::uint32_t stop;      // a Code; once it is not kOk all waits end and nothing more is written
  std::uint32_t odd_peer;  // 1 + the rank whose segment belongs to another operation; 0 for none
  std::uint32_t label;     // of the program that began last
  std::uint32_t reserved;
};

// What a row is for one share: no division is left to kernels.
struct Place {
  // Bytes from the beginning of input or output to the share's first element of the chunk. Nothing
  // for scratch, whose slot the row names.
  std::uint64_t source;
  std::uint64_t target;
  std::uint64_t length;       // elements; kAbsent: the share has no part in the row
  std::uint64_t agreement;    // hash of what both ends of each of the row's channels must agree on
  std::uint64_t landing = 0;  // as target, in the outputs of those it is sent to
};
inline constexpr std::uint64_t kAbsent = ~std::uint64_t{0};

// A lane whose rows run between two meetings of the block instead of two meetings each, all of
// whose channels are opened together; see joins() in binding.cpp for which lanes that is.
inline constexpr std::uint32_t kJoinedRowsMax = 16;
inline constexpr std::uint32_t kJoinedChannelsMax = 32;  // one per thread of the smallest block
inline constexpr std::uint32_t kPortsOfRow = plan::kRecvMax + plan::kSendMax;
// Of one channel in one tile: half of the segments that it holds.
inline constexpr std::uint32_t kUsesMax = kDepth / 2;

// The uses of one channel in a joined lane, in the order of the rows: kPortsOfRow * row + the
// channel's place among the row's received ones, or kRecvMax + that among its sent ones.
struct Chain {
  std::uint16_t uses[kUsesMax];
};
inline constexpr std::uint16_t kNoUse = 0xffff;

struct LaneRange {
  std::uint32_t begin;
  std::uint32_t end;
};

// Constant while kernels run, Ports, Control and runs apart. All pointers are device memory, those
// of `control`, `awaited` and `beats` the host's, mapped.
struct Program {
  const plan::Row* rows;
  const Place* places;           // of row r and share s at [r * shares + s]
  const Chain* chains;           // one per channel where the only lane is joined, else nullptr
  Port* const* ports;            // of channel c of the plan and share s at [c * shares + s]
  const Landing* landings;       // one per channel where segments may land, else nullptr
  const std::uint8_t* uses;      // of row r's i-th send channel at [r * kSendMax + i], in a tile
  const Registered* registered;  // of rank p under number n at [p * kRegisteredMax + n]
  std::byte* scratch;            // shares * scratch_slots slots
  Control* control;
  std::uint32_t* awaited;  // one per rank
  std::uint32_t* beats;    // one per block
  std::uint32_t* runs;     // the beats once more, where a block reads them fast
  LaneRange lanes[plan::kLanesMax];
  std::uint32_t lane_count;
  std::uint32_t channel_count;
  std::uint32_t shares;
  std::uint32_t scratch_slots;
  std::uint32_t slot_stride;     // bytes from one slot of a channel to the next
  std::uint64_t scratch_stride;  // the same of scratch
  std::uint64_t segment_length;  // elements
  std::uint64_t tiles;           // of every share, at least 1
  std::uint32_t rank;
  std::uint32_t item_bytes;
  std::uint32_t divisor;  // of final values; 0 if nothing is divided
  std::uint32_t label;    // what the host calls it
  DType dtype;
  ReduceOp op;
  // Some rank of the operation has several lanes: what one lane wrote may be read by another that
  // heard of it through other ranks, so that every segment must carry the order of memory with it.
  bool ordered;
};

// What changes from launch to launch of a program.
struct Call {
  const std::byte* input;
  std::byte* output;
  std::uint64_t registered = kNotRegistered;  // the number of the memory that has all of the output
  std::uint64_t output_bytes = 0;
};

// One of several arrays that an operation treats as if they lay one behind the other.
struct Part {
  const std::byte* input;
  std::byte* output;
  std::uint64_t end;  // bytes of this one and all in front of it; more than those in front
};

// Travels with the launch, whose parameters may have 4096 bytes.
inline constexpr std::uint32_t kPartsMax = 128;

// The same where memory is several arrays.
struct ListCall {
  Part parts[kPartsMax];  // those behind the last one are not looked at
  std::uint32_t count;
  std::uint32_t reserved;
};
static_assert(sizeof(Program) + sizeof(ListCall) <= 4096);

// More than array libraries have, and less where neighbours lie together.
inline constexpr std::uint32_t kAxesMax = 32;

// What the kernel that copies does with elements in C order: to `packed` from where they are
// strided, the way back, the same value everywhere, or the first two with a change to the wire form
// of `dtype` and `op` among so many ranks (kernels/wire.h), which is what is packed then.
struct Copy {
  enum class Kind : std::uint32_t { kPack = 0, kUnpack = 1, kFill = 2, kEnter = 3, kLeave = 4 };
  std::byte* packed;
  std::byte* strided;   // element 0; nullptr for kFill
  std::uint64_t count;  // elements
  Pack value;           // of kFill, its first item_bytes bytes
  Kind kind;
  std::uint32_t item_bytes;  // of an element that is strided, or filled
  std::uint32_t axes;
  std::uint32_t blocks;  // of the launch
  DType dtype;
  ReduceOp op;
  std::uint32_t wire_bytes;  // of an element in wire form
  std::uint32_t ranks;
  std::uint64_t lengths[kAxesMax];  // the last axis is the fastest
  std::int64_t strides[kAxesMax];   // bytes
};

}  // namespace pycoll::device
