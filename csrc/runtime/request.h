// What a caller asks of the engine. Plain values; the bindings fill them in, nothing here decides.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "kernels/reduce.h"
#include "kernels/wire.h"
#include "plan/image.h"
#include "transport/transport.h"

namespace pycoll::runtime {

// Memory of the caller, contiguous. Stays valid and, for inputs, unchanged until the operation is
// done; the bindings hold the exporting array for that long.
struct ConstMemory {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};
struct Memory {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

// One of several arrays that an operation treats as if they lay one behind the other.
struct Part {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::uint64_t end = 0;  // bytes of this one and all in front of it; more than those in front

  bool operator==(const Part&) const = default;
};

struct CollectiveRequest {
  std::shared_ptr<const plan::Image> plan;
  // Flat in block order (csrc/plan/FORMAT.md). They may be the same memory exactly for
  // all_reduce, broadcast, reduce, scan and exscan; otherwise they must not overlap.
  ConstMemory input;
  Memory output;
  // Where these are several arrays: all of them, each of whole elements, no output overlapping
  // anything but its own input. Then `input` and `output` have the bytes of all and the addresses
  // of the first, and both have all blocks. Empty: each is one array.
  std::vector<Part> parts;
  // Elements of each block of the whole collective, alike on all ranks.
  std::vector<std::uint64_t> counts;
  transport::Descriptor descriptor;
  transport::Shape shape;                  // of the caller's array, for texts
  kernels::Combine combine;                // empty where nothing is reduced
  kernels::ScaleFunction scale = nullptr;  // for avg: applied to final values
  // If not empty: counts, memory and the descriptor speak of the array's elements, `combine` and
  // the plan's rows of wire elements. An Execution turns the one into the other (wire_memory.h).
  kernels::WireForm form;
  // Set by a user's reduction that cannot go on, or nullptr: the operation then fails everywhere.
  const std::atomic<bool>* reduction_failed = nullptr;
  std::uint32_t segment_bytes = transport::kSegmentBytesMax;
};

// Instead of a peer, for a receive: whoever sends first.
inline constexpr int kAnyPeer = -1;

// A tagged message to or from one peer. For a send `data` is only read.
struct MessageRequest {
  enum class Kind : std::uint8_t { kSend, kRecv } kind = Kind::kSend;
  int peer = 0;
  std::uint32_t tag = 0;
  Memory data;
  // For receives from kAnyPeer, or nullptr: whom the message is from, written before the operation
  // is done.
  std::shared_ptr<int> sender = nullptr;
};

// In place of a tag, for a probe: any up to kTagMax. Tags beyond are of messages of our own.
inline constexpr std::uint32_t kAnyTag = ~std::uint32_t{0};
inline constexpr std::uint32_t kTagMax = (std::uint32_t{1} << 31) - 1;

// A message that has come, in part at least, and that no receive has claimed.
struct Probed {
  int source = 0;
  std::uint32_t tag = 0;
  std::uint64_t bytes = 0;  // of the whole message
};

// Asks for the earliest such message from `peer`, or kAnyPeer. It stays where it is.
struct ProbeRequest {
  int peer = kAnyPeer;
  std::uint32_t tag = kAnyTag;
  std::shared_ptr<Probed> found;  // written before the operation is done
};

}  // namespace pycoll::runtime
