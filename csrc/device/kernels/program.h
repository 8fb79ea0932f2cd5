// The data that a kernel reads: the rows of a validated plan, unchanged, together with this rank's
// counts, channels and memory. Host and device read the same structs.
//
//   share   a grid runs the whole plan `shares` times side by side. Each share covers one part of
//           every chunk and has channels of its own. A block runs one lane of one share, so blocks
//           never wait for blocks of their own rank.
//   port    one end of a channel of one share in one protocol
//
// All ranks use the same number of shares, protocol and segment length, as they use the same plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "device/kernels/pack.h"
#include "plan/plan.h"

namespace pycoll::device {

// How bytes cross peer memory; see protocols.h. The values index tables.
enum class Protocol : std::uint8_t { kLl = 0, kLl128 = 1, kSimple = 2, kPattern = 3 };
inline constexpr std::uint32_t kProtocolCount = 4;

// Segments that a channel holds: as many as transports hold, the bound that plan proofs assume.
inline constexpr std::uint32_t kDepth = 4;

// Shares of a chunk begin at multiples of this many bytes, so only the ends of a chunk are ragged.
inline constexpr std::uint32_t kGranuleBytes = 128;

inline constexpr std::uint32_t kThreadsMax = 512;

// A header holds a hash of the operation's terms and, in these low bits, the segment's length in
// bytes. The host proxy reads nothing else from a header.
inline constexpr std::uint64_t kLengthMask = (std::uint64_t{1} << 17) - 1;
// The bit above the length: the sender wrote the segment directly to the receiver's output, and not
// to its slot; see WriteWindow.
inline constexpr std::uint64_t kWrittenDirect = kLengthMask + 1;

// Memory of the caller that peers may write to: one array per rank under one number, addressed as
// the reading rank's kernels see it. Both fields are zero where nothing is registered.
struct alignas(kPackBytes) Registered {
  std::byte* memory;
  std::uint64_t bytes;
};
// Registered memories of one communicator; their numbers are below this.
inline constexpr std::uint32_t kRegisteredMax = 64;
inline constexpr std::uint64_t kNotRegistered = ~std::uint64_t{0};

// The receiver of a channel offers its registered output to the sender as a write window. The
// sender may then write segments directly to the output that the receiver would only copy there
// from a slot. The window lies behind the credit. It holds for the two launches, one at each end,
// that began at that step of the channel. The sender never waits for a window. The receiver writes
// it once per launch, `begun` last.
struct WriteWindow {
  std::uint64_t begun;      // 1 + the channel's step
  std::uint64_t uses;       // bit i: the channel's i-th use in a tile, see plan::DirectWrites
  std::uint64_t number;     // of the registered memory
  std::uint64_t offset;     // bytes from the start of that memory to the output
  std::uint64_t bytes;      // of the output
  std::uint64_t agreement;  // hash of the operation's terms
};

// Direct-write data of a channel, which its lane reads before its first row.
struct DirectWrite {
  std::uint64_t uses;  // WriteWindow::uses that the receiving end offers; 0 at the sending end
  std::uint32_t lane;  // the lane whose rows use the channel
  std::uint32_t reserved;
};

// One end of a channel, in its own rank's device memory; the other rank's end mirrors it. Slots and
// headers lie at the receiver, the credit at the sender, so that each rank polls its own memory.
//
//   sender                                       receiver
//   waits until *credit + kDepth > step
//   writes slots[step % kDepth], then the
//   header with flag step + 1             --->   waits for header and data with that flag
//   ++step                                       reads, then *credit = ++step
//
// Counts only grow, from launch to launch, so a captured launch can be replayed.
struct Port {
  std::byte* slots;       // kDepth of Program::slot_stride bytes, aligned to kGranuleBytes
  Pack* headers;          // kDepth
  std::uint64_t* credit;  // segments whose slots the receiver has released
  WriteWindow* window;    // of the receiver; nullptr where the host proxy moves the segments
  std::uint64_t step;     // segments through this end; only the block that owns the end accesses it
  std::uint64_t begun;    // 1 + the step when a launch began; accessed by the same block only
  std::uint32_t peer;
  std::uint32_t reserved;
};

// Values of Control::stop that a kernel writes: kStopMismatch after a segment of another operation,
// kStopReduction after codes that do not decode. They are the numbers of Code::kMismatch and
// Code::kReduction, since kernels do not see Status.
inline constexpr std::uint32_t kStopMismatch = 2;
inline constexpr std::uint32_t kStopReduction = 8;

// Words that host and kernels share while kernels run, in memory that both reach. One word per rank
// follows, which is nonzero if a wait for that rank was given up. Then follows one word per block,
// its beat: the block adds one when it begins and one when it ends, so the beat is odd while the
// block runs. The host reads from the beats which blocks run and for how long, for replayed graphs
// as well.
struct Control {
  std::uint32_t stop;  // a Code; once it is not kOk, all waits end and kernels write nothing more
  std::uint32_t odd_peer;  // 1 + the rank whose segment stopped the kernel; 0 for none
  std::uint32_t label;     // of the program that began last
  std::uint32_t reserved;
};

// The position of a row's bytes for one share, computed by the host: kernels divide nothing.
struct ShareOffsets {
  // Bytes from the beginning of input or output to the share's first element of the chunk. 0 for
  // scratch, whose slot the row names.
  std::uint64_t source;
  std::uint64_t target;
  std::uint64_t length;  // elements; kAbsent: the share has no part in the row
  // Hash of the terms that both ends of each of the row's channels must share.
  std::uint64_t agreement;
  // As target, in the outputs of the ranks that receive the row's segments.
  std::uint64_t direct_write = 0;
};
inline constexpr std::uint64_t kAbsent = ~std::uint64_t{0};

// A joined lane runs all its rows between two block barriers instead of two barriers per row, and
// opens all its channels together. joins() in binding.cpp says which lanes are joined.
inline constexpr std::uint32_t kJoinedRowsMax = 16;
inline constexpr std::uint32_t kJoinedChannelsMax = 32;  // one per thread of the smallest block
inline constexpr std::uint32_t kPortsOfRow = plan::kRecvMax + plan::kSendMax;
// Uses of one channel in one tile: half of the segments that it holds.
inline constexpr std::uint32_t kUsesMax = kDepth / 2;

// The uses of one channel in a joined lane, in the order of the rows. A use is kPortsOfRow * row +
// the channel's index among the row's receive channels, or kRecvMax + its index among the row's
// send channels.
struct Chain {
  std::uint16_t uses[kUsesMax];
};
inline constexpr std::uint16_t kNoUse = 0xffff;

struct LaneRange {
  std::uint32_t begin;
  std::uint32_t end;
};

// Constant while kernels run, except Ports, Control and runs. All pointers are device memory,
// except `control`, `waits` and `beats`, which are mapped host memory.
struct Program {
  const plan::Row* rows;
  const ShareOffsets* share_offsets;  // of row r and share s at [r * shares + s]
  const Chain* chains;                // one per channel where the only lane is joined, else nullptr
  Port* const* ports;                 // of channel c of the plan and share s at [c * shares + s]
  // One per channel where direct writes are possible, else nullptr.
  const DirectWrite* direct_writes;
  const std::uint8_t* uses;      // plan::DirectWrites::uses, indexed [row * kSendMax + i]
  const Registered* registered;  // of rank p under number n at [p * kRegisteredMax + n]
  std::byte* scratch;            // shares * scratch_slots slots
  Control* control;
  std::uint32_t* waits;  // one per rank
  std::uint32_t* beats;  // one per block
  std::uint32_t* runs;   // copies of the beats in device memory, which a block reads fast
  LaneRange lanes[plan::kLanesMax];
  std::uint32_t lane_count;
  std::uint32_t channel_count;
  std::uint32_t shares;
  std::uint32_t scratch_slots;
  std::uint32_t slot_stride;     // bytes from one slot of a channel to the next
  std::uint64_t scratch_stride;  // bytes from one scratch slot to the next
  std::uint64_t segment_length;  // elements
  std::uint64_t tiles;           // of every share, at least 1
  std::uint32_t rank;
  std::uint32_t item_bytes;
  std::uint32_t divisor;  // of final values; 0 if nothing is divided
  std::uint32_t label;    // the host's number for the operation's text
  DType dtype;
  ReduceOp op;
  // Some rank of the operation has several lanes. Then one lane may read what another lane wrote
  // after it learned of the write through other ranks, so every segment must order all memory.
  bool ordered;
};

// The parameters that change from launch to launch of a program.
struct Call {
  const std::byte* input;
  std::byte* output;
  // Number of the memory that contains the whole output.
  std::uint64_t registered = kNotRegistered;
  std::uint64_t output_bytes = 0;
};

// One of several arrays that an operation treats as one, in order.
struct Part {
  const std::byte* input;
  std::byte* output;
  // Bytes of this array and all arrays in front of it; more than those in front.
  std::uint64_t end;
};

// The list travels in the launch parameters, which may have 4096 bytes.
inline constexpr std::uint32_t kPartsMax = 128;

// The parameters of a launch on a list of arrays.
struct ListCall {
  Part parts[kPartsMax];  // entries from `count` on are not read
  std::uint32_t count;
  std::uint32_t reserved;
};
static_assert(sizeof(Program) + sizeof(ListCall) <= 4096);

// Array libraries have fewer axes. Neighbouring axes that are contiguous count as one.
inline constexpr std::uint32_t kAxesMax = 32;

// Parameters of the copy kernel, for elements in C order. kPack copies from strided memory to
// `packed`, kUnpack copies back, kFill stores one value everywhere. kEnter and kLeave are kPack and
// kUnpack with a conversion to or from the wire form of `dtype` and `op` among `ranks` ranks
// (kernels/wire.h); `packed` then holds wire elements.
struct Copy {
  enum class Kind : std::uint32_t { kPack = 0, kUnpack = 1, kFill = 2, kEnter = 3, kLeave = 4 };
  std::byte* packed;
  std::byte* strided;   // element 0; nullptr for kFill
  std::uint64_t count;  // elements
  Pack value;           // of kFill: its first item_bytes bytes
  Kind kind;
  std::uint32_t item_bytes;  // of an element in strided memory, or of the fill value
  std::uint32_t axes;
  std::uint32_t blocks;  // of the launch
  DType dtype;
  ReduceOp op;
  std::uint32_t wire_bytes;  // of an element in wire form
  std::uint32_t ranks;
  std::uint64_t lengths[kAxesMax];  // elements; the last axis is the fastest
  std::int64_t strides[kAxesMax];   // bytes
};

}  // namespace pycoll::device
