// From a request to a program: the plan joined with counts, channels and memory, checked. The
// ranges are those of runtime/bound_plan.h, which is asked for them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "device/arena.h"
#include "device/program.h"
#include "runtime/request.h"

namespace pycoll::device {

// How the ranks agreed to run an operation.
struct Manner {
  Protocol protocol = Protocol::kSimple;
  std::uint32_t shares = 1;
  bool ordered = false;  // some rank's plan has several lanes; see Program::ordered
  bool lands = false;    // some memory may be registered
};

// Everything of a program but addresses of device memory; whoever has such memory copies rows,
// places, chains and ports there and fills in the pointers and `label`.
struct Binding {
  Program program{};
  std::vector<Place> places;
  std::vector<Chain> chains;      // none where the lane is not joined
  std::vector<Landing> landings;  // none where nothing may land
  std::vector<std::uint8_t> uses;
  std::vector<std::uint32_t> ports;  // port_index() of each entry of Program::ports
  std::uint64_t scratch_bytes = 0;   // aligned to kGranuleBytes
  std::uint64_t longest = 0;         // elements of the longest share of any chunk
};

// What one more block per lane is worth in Simple; in other protocols it is one segment, so that a
// message is one push and one poll however long it is.
inline constexpr std::uint64_t kBytesPerShare = 128 * 1024;

// The elements of a chunk that are one share's; they begin at a multiple of kGranuleBytes.
Range share_of(std::uint64_t length, std::size_t item, std::uint32_t shares, std::uint32_t share);

// The request's memory is device memory and is not touched; `combine` and `scale` only say whether
// values are combined and divided. kInvalidArgument names what does not fit and leaves *binding
// as it was. Any thread.
Status bind(const runtime::CollectiveRequest& request, const Shape& shape, const Manner& manner,
            Binding* binding);

// What a kernel for lists is launched with. Requires: bind() took the request.
ListCall list_call(const runtime::CollectiveRequest& request);

// Memory of the caller that is not in C order.
struct Strided {
  std::byte* memory = nullptr;         // element 0
  std::vector<std::uint64_t> lengths;  // by axis, none of them 0
  std::vector<std::int64_t> strides;   // bytes
};

// Between strided memory and `packed`. kInvalidArgument where there are too many axes.
Status make_copy(Copy::Kind kind, const Strided& strided, std::byte* packed,
                 std::uint32_t item_bytes, Copy* copy);
// `count` elements that are all `value`.
// `copy` as a change to the wire form of its elements, or from there.
Status make_conversion(Copy::Kind kind, const Strided& strided, std::byte* wire, DType dtype,
                       ReduceOp op, std::uint32_t ranks, Copy* copy);
Copy make_fill(std::byte* packed, std::uint64_t count, Pack value, std::uint32_t item_bytes);

}  // namespace pycoll::device
