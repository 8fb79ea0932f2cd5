// Requests of a caller to the engine: plain values that the bindings fill in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "executor/call_arrays.h"
#include "kernels/codecs.h"
#include "kernels/reduce.h"
#include "kernels/wire.h"
#include "plan/image.h"
#include "transport/transport.h"

namespace pycoll::executor {

// Contiguous memory of the caller. It stays valid and, for inputs, unchanged until the operation is
// done. The bindings hold the exporting array for that long.
struct ConstMemory {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};
struct Memory {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

// One of several arrays that an operation treats as one concatenated array.
struct Part {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::uint64_t end = 0;  // bytes of this array and all arrays in front of it; strictly ascending

  bool operator==(const Part&) const = default;
};

struct CollectiveRequest {
  std::shared_ptr<const plan::Image> plan;
  // Contiguous, in block order (csrc/plan/FORMAT.md). Input and output may be exactly the same
  // memory for all_reduce, broadcast, reduce, scan and exscan; otherwise they must not overlap.
  ConstMemory input;
  Memory output;
  // All arrays, if input and output consist of several: each of whole elements, and
  // no output overlaps anything but its own input. Then `input` and `output` have
  // the total of bytes and the addresses of the first array, and both hold all
  // blocks. Empty: input and output are one array each.
  std::vector<Part> parts;
  // Elements of each block of the whole collective; the same on all ranks.
  std::vector<std::uint64_t> counts;
  transport::Descriptor descriptor;
  // The caller's array or arrays; nullptr where ranks compare no shape.
  std::shared_ptr<const CallArrays> arrays;
  kernels::Combine combine;                // empty if the collective does not reduce
  kernels::ScaleFunction scale = nullptr;  // for avg: applied to final values
  // If not empty: counts, memory and the descriptor are in elements of the array; `combine` and the
  // rows of the plan count wire elements. An Execution converts between the two (wire_memory.h).
  kernels::WireForm form;
  // How the plan's codes hold float32; nullopt only if the plan has no codes. With a codec the
  // descriptor's op is kSum or kAvg; it is kSum where nothing is reduced.
  std::optional<kernels::Codec> codec;
  // One float32 for each element of the input, or no memory: the part that codes of earlier calls
  // left out. A row that encodes adds this part to its values, and stores the part that its codes
  // leave out.
  Memory residual;
  // A user's reduction sets this flag when it cannot go on; the operation then fails on all ranks.
  // nullptr: no such reduction.
  const std::atomic<bool>* reduction_failed = nullptr;
  std::uint32_t segment_bytes = transport::kSegmentBytesMax;
};

// As the peer of a receive: any source, the first message that arrives.
inline constexpr int kAnyPeer = -1;

// A tagged message to or from one peer. A send only reads `data`.
struct MessageRequest {
  enum class Kind : std::uint8_t { kSend, kRecv } kind = Kind::kSend;
  int peer = 0;
  std::uint32_t tag = 0;
  Memory data;
  // For receives from kAnyPeer: the source of the message, written
  // before the operation is done. May be nullptr.
  std::shared_ptr<int> sender = nullptr;
};

// As the tag of a probe: any tag up to kTagMax. Larger
// tags are reserved for messages of pycoll itself.
inline constexpr std::uint32_t kAnyTag = ~std::uint32_t{0};
inline constexpr std::uint32_t kTagMax = (std::uint32_t{1} << 31) - 1;

// A message that has arrived, at least in part, and that no receive has claimed.
struct Probed {
  int source = 0;
  std::uint32_t tag = 0;
  std::uint64_t bytes = 0;  // of the whole message
};

// Asks for the earliest such message from `peer`, or kAnyPeer. The message stays in the mailbox.
struct ProbeRequest {
  int peer = kAnyPeer;
  std::uint32_t tag = kAnyTag;
  std::shared_ptr<Probed> found;  // written before the operation is done
};

}  // namespace pycoll::executor
