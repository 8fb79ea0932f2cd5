// State of one row while the executor runs it. Only for the source files of Execution.
#pragma once

#include <cstddef>

#include "executor/execution.h"

namespace pycoll::executor {

// The segments that have arrived for a row.
struct Execution::Collected {
  const std::byte* received[plan::kRecvMax];
  bool exposed = false;           // some of it may change while it is read, see ZeroCopyReceiver
  bool written_directly = false;  // the sender has written the row's only segment into the target
};

// Everything that a row needs once its channels are ready. Constructed for every row; the arrays
// beyond their counts stay uninitialized to keep that cheap.
struct Execution::Gathered {
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

  const std::byte* operands[plan::kOperandsMax];
  int operand_count = 0;
  int local = -1;  // index of this rank's own operand; -1: none
  std::byte* target = nullptr;
  SlotBuffer slot_buffers[plan::kSendMax];
  int slot_buffer_count = 0;
  std::uint32_t exposed = 0;  // bit i: the peer reads send i in the target; no slot buffer
  std::uint32_t written_directly =
      0;  // bit i: send i is written into a window of its peer; no slot buffer
};

}  // namespace pycoll::executor
