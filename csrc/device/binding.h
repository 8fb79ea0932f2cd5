// Binds a request to a program: joins the plan with counts, channels and memory, and checks it.
// executor/bound_plan.h computes the ranges.
#pragma once

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "device/kernels/program.h"
#include "device/memory/channel_memory.h"
#include "executor/request.h"

namespace pycoll::device {

// How all ranks run an operation.
struct Manner {
  Protocol protocol = Protocol::kSimple;
  std::uint32_t shares = 1;
  bool ordered = false;        // some rank's plan has several lanes; see Program::ordered
  bool direct_writes = false;  // arrays may be registered
};

// A program without addresses of device memory. The caller copies rows, offsets, chains and ports
// to device memory and fills in the pointers and `label`.
struct Binding {
  Program program{};
  std::vector<ShareOffsets> share_offsets;
  std::vector<Chain> chains;               // empty where the lane is not joined
  std::vector<DirectWrite> direct_writes;  // empty where nothing may be written directly
  std::vector<std::uint8_t> uses;
  std::vector<std::uint32_t> ports;  // port_index() of each entry of Program::ports
  std::uint64_t scratch_bytes = 0;   // aligned to kGranuleBytes
  std::uint64_t longest = 0;         // elements of the longest share of any chunk
};

// Bytes of an operation for which Simple uses one more share. Other protocols use one share per
// segment, so that a message of any length is one push and one poll.
inline constexpr std::uint64_t kBytesPerShare = 128 * 1024;

// One share's elements of a chunk; they begin at a multiple of kGranuleBytes.
Range share_of(std::uint64_t length, std::size_t item, std::uint32_t shares, std::uint32_t share);

// The request's memory is device memory, which bind() does not access. `combine` and `scale` only
// say whether values are combined and divided. kInvalidArgument names the value that does not fit
// and leaves *binding unchanged. Any thread.
Status bind(const executor::CollectiveRequest& request, const Shape& shape, const Manner& manner,
            Binding* binding);

// The parameters of a launch on a list. Requires: bind() accepted the request.
ListCall list_call(const executor::CollectiveRequest& request);

// Memory of the caller that is not in C order.
struct Strided {
  std::byte* memory = nullptr;         // element 0
  std::vector<std::uint64_t> lengths;  // by axis, none of them 0
  std::vector<std::int64_t> strides;   // bytes
};

// A copy between strided memory and `packed`. kInvalidArgument where there are too many axes.
Status make_copy(Copy::Kind kind, const Strided& strided, std::byte* packed,
                 std::uint32_t item_bytes, Copy* copy);
// A copy that also converts elements to their wire form (kEnter), or back (kLeave).
Status make_conversion(Copy::Kind kind, const Strided& strided, std::byte* wire, DType dtype,
                       ReduceOp op, std::uint32_t ranks, Copy* copy);
// Stores `value` in `count` elements.
Copy make_fill(std::byte* packed, std::uint64_t count, Pack value, std::uint32_t item_bytes);

}  // namespace pycoll::device
