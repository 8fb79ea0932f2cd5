// The ticket locks of channels. The next execution gets a channel when the one before no longer
// uses it, which includes memory that the channel still reads.
#include <algorithm>
#include <utility>

#include "executor/execution.h"

namespace pycoll::executor {

// All rows that use a channel are in one lane, so the lane's
// position tells when the channel is no longer used.
void Execution::find_last_rows() {
  const auto rows = request_.plan->plan().rows;
  for (std::uint32_t index = 0; index < rows.size(); ++index) {
    const plan::Row& row = rows[index];
    for (int i = 0; i < row.recv_count; ++i) ports_[row.recv[i]].last_row = index;
    for (int i = 0; i < row.send_count; ++i) ports_[row.send[i]].last_row = index;
  }
}

bool Execution::has_tickets(const plan::Row& row) const {
  if (has_all_tickets_) return true;
  const auto ours = [this](std::uint16_t index) {
    return ports_[index].ticket_lock->served == ports_[index].ticket;
  };
  return std::all_of(row.recv, row.recv + row.recv_count, ours) &&
         std::all_of(row.send, row.send + row.send_count, ours);
}

void Execution::pass_on(Port& port) {
  port.passed_on = true;
  ++port.ticket_lock->served;
}

// Called when the row has run. The next execution gets the channels that no later row of this one
// uses. A channel that still reads memory of this execution is kept, so that drained() concerns the
// memory of one execution only.
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
      port.exposed = exposes_ = true;
    }
  }
}

// Passes on the channels whose exposed memory is no longer read.
void Execution::take_back() {
  exposes_ = false;
  for (Port& port : ports_) {
    if (!port.exposed || port.passed_on) continue;
    if (port.send->drained()) {
      pass_on(port);
    } else {
      exposes_ = true;
    }
  }
}

void Execution::drop() {
  for (Port& port : ports_) {
    if (!port.passed_on) pass_on(port);
  }
  if (traversals()) --channels_->traversals();
  exposes_ = false;
  held_.clear();
}

// Holds tell whether peers read or write arena memory
// in place; channels tell about all other memory.
bool Execution::can_drop(const std::byte* input, const std::byte* output) const {
  if (std::any_of(held_.begin(), held_.end(), [](const auto& one) { return one.holds(); })) {
    return false;
  }
  const auto is_read = [this](const std::byte* data, std::size_t bytes) {
    return bytes != 0 && std::any_of(ports_.begin(), ports_.end(), [&](const Port& port) {
             return port.send != nullptr && !port.passed_on && port.reads(data, bytes);
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

// Called when all rows have run. Passes on the remaining channels; true if none remains.
bool Execution::pass_on_rest() {
  bool all = true;
  for (Port& port : ports_) {
    if (port.passed_on) continue;
    // An earlier execution may still use a channel that no row of this one has used.
    const bool ours = port.ticket_lock->served == port.ticket;
    if (ours && (port.send == nullptr || port.send->drained())) {
      pass_on(port);
    } else {
      all = false;
    }
  }
  if (all) held_.clear();
  return all;
}

}  // namespace pycoll::executor
