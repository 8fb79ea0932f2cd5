// Channels among the executions that share them: each gets a channel when the one before is through
// with it, memory that is still being read included.
#include <algorithm>
#include <utility>

#include "runtime/execution.h"

namespace pycoll::runtime {

// All rows that use a channel are of one lane, so that the lane's place tells who is through.
void Execution::find_last_rows() {
  const auto rows = request_.plan->plan().rows;
  for (std::uint32_t index = 0; index < rows.size(); ++index) {
    const plan::Row& row = rows[index];
    for (int i = 0; i < row.recv_count; ++i) ports_[row.recv[i]].last_row = index;
    for (int i = 0; i < row.send_count; ++i) ports_[row.send[i]].last_row = index;
  }
}

bool Execution::has_turns(const plan::Row& row) const {
  if (has_all_turns_) return true;
  const auto ours = [this](std::uint16_t index) {
    return ports_[index].turn->served == ports_[index].ticket;
  };
  return std::all_of(row.recv, row.recv + row.recv_count, ours) &&
         std::all_of(row.send, row.send + row.send_count, ours);
}

void Execution::pass_on(Port& port) {
  port.passed_on = true;
  ++port.turn->served;
}

// The row has run: the next execution gets the channels that no later row of this one uses. A
// channel that still reads this one's memory stays, so that its drained() speaks of nobody else's.
void Execution::pass_on_behind(const plan::Row& row, std::uint32_t index) {
  for (int i = 0; i < row.recv_count; ++i) {
    Port& port = ports_[row.recv[i]];
    if (port.last_row == index) pass_on(port);
  }
  for (int i = 0; i < row.send_count; ++i) {
    Port& port = ports_[row.send[i]];
    if (port.last_row != index) continue;
    if (port.send->drained()) {
      pass_on(port);
    } else {
      port.lent = lends_ = true;
    }
  }
}

// Passes on what was lent and is read by nobody any more.
void Execution::take_back() {
  lends_ = false;
  for (Port& port : ports_) {
    if (!port.lent || port.passed_on) continue;
    if (port.send->drained()) {
      pass_on(port);
    } else {
      lends_ = true;
    }
  }
}

void Execution::drop() {
  for (Port& port : ports_) {
    if (!port.passed_on) pass_on(port);
  }
  if (sweeps()) --channels_->sweeps();
  lends_ = false;
  held_.clear();
}

// Peers read or write memory of the arena where it lies; what else they could still be sent from
// there, channels tell.
bool Execution::can_drop(const std::byte* input, const std::byte* output) const {
  if (std::any_of(held_.begin(), held_.end(), [](const auto& one) { return one.holds(); })) {
    return false;
  }
  const auto is_read = [this](const std::byte* data, std::size_t bytes) {
    return bytes != 0 && std::any_of(ports_.begin(), ports_.end(), [&](const Port& port) {
             return port.send != nullptr && !port.passed_on && port.send->reads(data, bytes);
           });
  };
  if (request_.parts.empty()) {
    return !is_read(input, request_.input.bytes) && !is_read(output, request_.output.bytes);
  }
  std::uint64_t begin = 0;
  return std::none_of(request_.parts.begin(), request_.parts.end(), [&](const Part& part) {
    const std::uint64_t bytes = part.end - std::exchange(begin, part.end);
    return is_read(part.input, bytes) || is_read(part.output, bytes);
  });
}

// All rows have run: passes on what is left. True when that was all of it.
bool Execution::settle() {
  bool all = true;
  for (Port& port : ports_) {
    if (port.passed_on) continue;
    // An earlier execution may still use a channel that no row of this one did.
    const bool ours = port.turn->served == port.ticket;
    if (ours && (port.send == nullptr || port.send->drained())) {
      pass_on(port);
    } else {
      all = false;
    }
  }
  if (all) held_.clear();
  return all;
}

}  // namespace pycoll::runtime
