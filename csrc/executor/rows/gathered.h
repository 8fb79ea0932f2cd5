// The data of one row while the executor runs it: operands, and places for the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "executor/bound_plan.h"
#include "plan/plan.h"
#include "transport/capabilities.h"

namespace pycoll::executor {

// Memory of a peer that gets a copy of the result: a slot buffer, or a place in a write window.
struct SlotBuffer {
  transport::StoreHints* hints;     // nullptr: ordinary stores suit
  transport::DirectWriter* window;  // nullptr: a slot buffer; else in a write window of the peer
  std::byte* data;

  void fill(std::size_t skip, const std::byte* from, std::size_t bytes) const {
    if (window != nullptr) return window->write(data + skip, from, bytes);
    transport::fill_slot_buffer(hints, data + skip, from, bytes);
  }
  bool suits_results() const {
    return window == nullptr && (hints == nullptr || !hints->wants_fill());
  }
};

// Everything that a row needs once its channels are ready. Constructed for every row; the arrays
// beyond their counts stay uninitialized to keep that cheap.
struct Gathered {
  // Collects the row's operands in their order, and the local address of the result. `received`:
  // the arrived segments. `skip`: bytes from the beginning of the chunk to the segment.
  void collect(const BoundRow& bound, const std::byte* const* received, std::size_t skip) {
    // A scratch slot is one segment and starts at zero in every tile; input and output advance.
    const auto at = [skip](std::byte* base, std::uint8_t buffer) {
      return static_cast<plan::Buffer>(buffer) == plan::Buffer::kScratch ? base : base + skip;
    };
    const plan::Row& row = *bound.row;
    const bool has_source = static_cast<plan::Buffer>(row.source) != plan::Buffer::kNone;
    if (row.carry != 0) operands[operand_count++] = bound.carry;
    for (int i = 0; i <= row.recv_count; ++i) {
      if (has_source && i == row.source_position) {
        local = operand_count;
        operands[operand_count++] = at(bound.source, row.source);
      }
      if (i < row.recv_count) operands[operand_count++] = received[i];
    }
    if (static_cast<plan::Buffer>(row.target) != plan::Buffer::kNone) {
      target = at(bound.target, row.target);
    }
  }

  const std::byte* operands[plan::kOperandsMax];
  int operand_count = 0;
  int local = -1;  // index of this rank's own operand; -1: none
  std::byte* target = nullptr;
  SlotBuffer slot_buffers[plan::kSendMax];
  int slot_buffer_count = 0;
  std::uint32_t exposed = 0;  // bit i: the peer reads send i in the target; no slot buffer
  // Bit i: send i is written into a window of its peer; no slot buffer.
  std::uint32_t written_directly = 0;
};

}  // namespace pycoll::executor
