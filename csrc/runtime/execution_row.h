// What the executor knows of one row while it runs it; for the files of Execution alone.
#pragma once

#include <cstddef>

#include "runtime/execution.h"

namespace pycoll::runtime {

// What has arrived for a row.
struct Execution::Collected {
  const std::byte* received[plan::kRecvMax];
  bool lent = false;    // some of it may change, see RecvChannel::intact
  bool placed = false;  // the row's only segment is in its target already
};

// Everything that one row needs once its channels are ready. Made for every row, so that what lies
// beyond the counts is not even zeroed.
struct Execution::Gathered {
  struct Room {
    transport::SendChannel* channel;
    std::byte* data;
    bool placed;  // in memory that the peer offered

    void fill(std::size_t skip, const std::byte* from, std::size_t bytes) const {
      placed ? channel->place(data + skip, from, bytes) : channel->fill(data + skip, from, bytes);
    }
  };

  const std::byte* operands[plan::kOperandsMax];
  int operand_count = 0;
  int local = -1;  // which operand is this rank's own; -1: none
  std::byte* target = nullptr;
  Room rooms[plan::kSendMax];
  int room_count = 0;
  std::uint32_t lent = 0;    // bit i: send i is to be read in the target, and needs no room
  std::uint32_t placed = 0;  // bit i: send i goes to where its peer offers, and needs none either
};

}  // namespace pycoll::runtime
