// A plan joined with the memory and counts of one call. This is the only place
// where chunks become byte ranges, and where every range is proven to lie inside
// its buffer. Rows hold addresses from here on.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "executor/request.h"
#include "plan/plan.h"

namespace pycoll::executor {

// Whether a row's Buffer is memory of the caller (input or output).
inline bool in_memory(std::uint8_t buffer) {
  const auto kind = static_cast<plan::Buffer>(buffer);
  return kind == plan::Buffer::kInput || kind == plan::Buffer::kOutput;
}

struct BoundRow {
  const plan::Row* row = nullptr;
  // Address of element 0 of the chunk, or of the scratch slot. No row writes through it.
  std::byte* source = nullptr;
  const std::byte* carry = nullptr;  // the scratch slot that holds the first operand
  std::byte* target = nullptr;
  std::uint64_t length = 0;          // elements of the chunk
  std::uint64_t receiver_bytes = 0;  // byte offset of the chunk in its receivers' outputs
  float* residual = nullptr;         // of element 0, in a row that encodes; nullptr: none
};

// Reusable: bind() keeps the capacity of earlier calls, so that it
// allocates only while it grows. One thread at a time.
class BoundPlan {
 public:
  // Checks that counts, buffers and plan fit together, and resolves every row.
  // Fails with kInvalidArgument and names the value that does not fit. For a request with a wire
  // form, counts and buffers already count wire elements. Keeps pointers into the memory and the
  // plan of `request`; both must outlive the use of this object.
  Status bind(const CollectiveRequest& request);

  // Replaces input and output by other memory of the same lengths. Requires: bind() succeeded.
  void move_to(const std::byte* input, std::byte* output);

  const std::vector<BoundRow>& rows() const { return rows_; }
  std::uint64_t tiles() const { return tiles_; }
  std::uint64_t segment_length() const { return segment_length_; }  // elements
  std::size_t item_bytes() const { return item_bytes_; }
  // Bytes of the longest segment that any rank sends; the same on all ranks.
  std::size_t longest_bytes() const { return longest_bytes_; }
  const std::byte* input() const { return input_; }
  std::byte* output() const { return output_; }

 private:
  // Position of a chunk, in elements. An offset has no
  // meaning in a buffer that does not hold the chunk.
  struct ChunkOffsets {
    std::uint64_t input_offset;
    std::uint64_t output_offset;
    std::uint64_t receiver_offset;  // in the outputs of the ranks that hold the chunk
    std::uint64_t length;
  };

  Status measure(const CollectiveRequest& request);
  Status bind_row(const CollectiveRequest& request, std::size_t index);
  Status bind_residual(const CollectiveRequest& request, std::size_t index,
                       const ChunkOffsets& chunk);
  ChunkOffsets locate(const plan::Header& header, std::uint32_t chunk) const;
  std::byte* address(std::uint8_t buffer, std::uint32_t slot, const ChunkOffsets& offsets,
                     const CollectiveRequest& request);
  std::byte* scratch(std::uint32_t slot);
  std::byte* translate(std::byte* at, std::uint8_t buffer, const std::byte* input,
                       std::byte* output) const;

  std::vector<BoundRow> rows_;
  std::vector<std::uint64_t> input_offsets_;  // elements before each block in this rank's input
  std::vector<std::uint64_t> output_offsets_;
  // Elements before each block in the outputs of the ranks that hold the block.
  std::vector<std::uint64_t> receiver_offsets_;
  std::vector<std::uint64_t> held_;  // by output group: elements of its blocks so far
  std::vector<std::uint64_t> counts_;
  std::vector<std::byte> scratch_;
  std::size_t slot_bytes_ = 0;  // distance from one scratch slot to the next
  const std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::uint64_t input_length_ = 0;
  std::uint64_t output_length_ = 0;
  std::uint64_t tiles_ = 1;
  std::uint64_t segment_length_ = 1;
  std::size_t item_bytes_ = 1;
  std::size_t longest_bytes_ = 0;
};

}  // namespace pycoll::executor
