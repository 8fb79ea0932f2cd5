#include "executor/ports.h"

#include <algorithm>

namespace pycoll::executor {
namespace {

void pass_on(Port& port) {
  port.passed_on = true;
  ++port.ticket_lock->served;
}

}  // namespace

void Ports::bind(const plan::Plan& plan, ChannelSource& channels) {
  ports_.clear();
  abilities_.clear();
  for (const plan::Channel& channel : plan.channels) add(channel, channels);
  find_last_rows(plan);
  find_alternates(plan);
}

void Ports::add(const plan::Channel& channel, ChannelSource& channels) {
  Port& port = ports_.emplace_back();
  Abilities& can = abilities_.emplace_back();
  port.peer = static_cast<int>(channel.peer);
  if (static_cast<plan::Direction>(channel.direction) == plan::Direction::kSend) {
    port.send = &channels.send_channel(port.peer, channel.number);
    port.ticket_lock = &channels.send_ticket(port.peer, channel.number);
    can.send = port.send->capabilities();
    port.sources = can.send.sources;
    if (can.send.multicast != nullptr) can.memory = can.send.multicast->memory();
  } else {
    port.recv = &channels.recv_channel(port.peer, channel.number);
    port.ticket_lock = &channels.recv_ticket(port.peer, channel.number);
    can.recv = port.recv->capabilities();
  }
}

// All rows that use a channel are in one lane, so the lane's position tells when the channel is no
// longer used.
void Ports::find_last_rows(const plan::Plan& plan) {
  for (std::uint32_t index = 0; index < plan.rows.size(); ++index) {
    const plan::Row& row = plan.rows[index];
    for (int i = 0; i < row.recv_count; ++i) ports_[row.recv[i]].last_row = index;
    for (int i = 0; i < row.send_count; ++i) ports_[row.send[i]].last_row = index;
  }
}

// Marks the second, fourth ... channel to a peer among those that carry data.
void Ports::find_alternates(const plan::Plan& plan) {
  std::vector<bool> used(ports_.size(), false);
  for (const plan::Row& row : plan.rows) {
    if (row.chunk == plan::kToken) continue;
    for (int i = 0; i < row.send_count; ++i) used[row.send[i]] = true;
  }
  std::vector<int> peers;
  for (std::size_t i = 0; i < ports_.size(); ++i) {
    if (!used[i]) continue;
    Port& port = ports_[i];
    port.alternate = std::count(peers.begin(), peers.end(), port.peer) % 2 == 1;
    peers.push_back(port.peer);
  }
}

void Ports::begin() {
  owned_all_ = true;
  any_exposed_ = false;
  for (Port& port : ports_) {
    port.ticket = port.ticket_lock->issued++;
    port.passed_on = port.exposed = false;
    owned_all_ &= port.ticket_lock->served == port.ticket;
  }
}

bool Ports::owns(const plan::Row& row) const {
  if (owned_all_) return true;
  const auto ours = [this](std::uint16_t index) {
    return ports_[index].ticket_lock->served == ports_[index].ticket;
  };
  return std::all_of(row.recv, row.recv + row.recv_count, ours) &&
         std::all_of(row.send, row.send + row.send_count, ours);
}

void Ports::pass_on_behind(const plan::Row& row, std::uint32_t index) {
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
      port.exposed = any_exposed_ = true;
    }
  }
}

void Ports::look_at_exposed() {
  any_exposed_ = false;
  for (Port& port : ports_) {
    if (!port.exposed || port.passed_on) continue;
    if (port.send->drained()) {
      pass_on(port);
    } else {
      any_exposed_ = true;
    }
  }
}

bool Ports::pass_on_rest() {
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
  return all;
}

void Ports::drop() {
  for (Port& port : ports_) {
    if (!port.passed_on) pass_on(port);
  }
  any_exposed_ = false;
}

bool Ports::reads(const std::byte* data, std::size_t bytes) const {
  return std::any_of(ports_.begin(), ports_.end(), [&](const Port& port) {
    if (port.send == nullptr || port.passed_on) return false;
    return port.sources != nullptr ? port.sources->reads(data, bytes) : !port.send->drained();
  });
}

bool Ports::reads_any() const {
  return std::any_of(ports_.begin(), ports_.end(), [](const Port& port) {
    if (port.send == nullptr || port.passed_on) return false;
    return port.sources != nullptr ? !port.sources->flushed() : !port.send->drained();
  });
}

}  // namespace pycoll::executor
