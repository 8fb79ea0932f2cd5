// A plan joined with this call's memory and counts: from here on rows know addresses. This is the
// one place where chunks become bytes, and where every range is proven to lie inside its buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "plan/plan.h"
#include "runtime/request.h"

namespace pycoll::runtime {

// Whether a row's Buffer is memory of the caller.
inline bool in_memory(std::uint8_t buffer) {
  const auto kind = static_cast<plan::Buffer>(buffer);
  return kind == plan::Buffer::kInput || kind == plan::Buffer::kOutput;
}

struct BoundRow {
  const plan::Row* row = nullptr;
  // Element 0 of the chunk, or the scratch slot; never written through.
  std::byte* source = nullptr;
  const std::byte* carry = nullptr;  // the scratch slot
  std::byte* target = nullptr;
  std::uint64_t length = 0;   // elements of the chunk
  std::uint64_t landing = 0;  // bytes in front of it in the outputs of those it is sent to
};

// Reused from call to call: bind() keeps the capacity of earlier calls, so that it allocates only
// while it grows. One thread at a time.
class BoundPlan {
 public:
  // Checks that counts, buffers and plan fit together (kInvalidArgument names what does not; of a
  // request with a wire form they are those of wire elements already) and
  // resolves every row. Keeps pointers into `request`'s memory and plan; they must outlive its use.
  Status bind(const CollectiveRequest& request);

  // The same plan with other memory of the same lengths. Requires: bind() succeeded.
  void move_to(const std::byte* input, std::byte* output);

  const std::vector<BoundRow>& rows() const { return rows_; }
  std::uint64_t tiles() const { return tiles_; }
  std::uint64_t segment_length() const { return segment_length_; }  // elements
  std::size_t item_bytes() const { return item_bytes_; }
  // Of the longest segment that any rank sends, the same on all.
  std::size_t longest_bytes() const { return longest_bytes_; }
  std::byte* output() const { return output_; }

 private:
  // Where a chunk lies, in elements. An offset means nothing in a buffer that does not hold it.
  struct Place {
    std::uint64_t input_offset;
    std::uint64_t output_offset;
    std::uint64_t landing;  // in the outputs of the ranks that hold it
    std::uint64_t length;
  };

  Status measure(const CollectiveRequest& request);
  Status bind_row(const CollectiveRequest& request, std::size_t index);
  Place locate(const plan::Header& header, std::uint32_t chunk) const;
  std::byte* address(std::uint8_t buffer, std::uint32_t slot, const Place& place,
                     const CollectiveRequest& request);
  std::byte* scratch(std::uint32_t slot);
  std::byte* moved(std::byte* place, std::uint8_t buffer, const std::byte* input,
                   std::byte* output) const;

  std::vector<BoundRow> rows_;
  std::vector<std::uint64_t> input_offsets_;  // elements before each block in this rank's input
  std::vector<std::uint64_t> output_offsets_;
  std::vector<std::uint64_t> landings_;  // the same in the outputs of the ranks that hold it
  std::vector<std::uint64_t> held_;      // elements of each output group (plan/layout.h)
  std::vector<std::uint64_t> counts_;
  std::vector<std::byte> scratch_;
  std::size_t slot_bytes_ = 0;  // from one scratch slot to the next
  const std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::uint64_t input_length_ = 0;
  std::uint64_t output_length_ = 0;
  std::uint64_t tiles_ = 1;
  std::uint64_t segment_length_ = 1;
  std::size_t item_bytes_ = 1;
  std::size_t longest_bytes_ = 0;
};

}  // namespace pycoll::runtime
