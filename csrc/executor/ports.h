// The channels of a plan while one execution uses them. Executions own each channel one after the
// other, in the order in which they began.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "transport/capabilities.h"
#include "transport/transport.h"

namespace pycoll::executor {

// A ticket lock for one end of a channel. Both counts only grow.
struct ChannelTicket {
  std::uint64_t issued = 0;  // executions that have begun
  std::uint64_t served = 0;  // executions that no longer use the channel
};

// Finds the channels of a plan and their ticket locks, and knows the facts that concern several
// executions. The engine implements it over its links.
class ChannelSource {
 public:
  virtual ~ChannelSource() = default;
  virtual transport::SendChannel& send_channel(int peer, std::uint32_t number) = 0;
  virtual transport::RecvChannel& recv_channel(int peer, std::uint32_t number) = 0;
  // The ticket locks outlive every execution that was bound to them.
  virtual ChannelTicket& send_ticket(int peer, std::uint32_t number) = 0;
  virtual ChannelTicket& recv_ticket(int peer, std::uint32_t number) = 0;
  // Number of begun executions for which Execution::traversals() is true. begin() increments
  // it, drop() decrements it. The number is the same on all ranks for the same execution, because
  // all ranks begin these executions in the same order.
  virtual std::uint64_t& traversals() = 0;
  // The bytes of memory from which copies bypass the caches (base/cache.h).
  virtual std::size_t uncached_bytes() const = 0;
  // Whether this operation has ended on all ranks because one of them refused it. Its segments that
  // remain in channels are then discarded.
  virtual bool is_dropped(std::uint64_t sequence) const = 0;
};

// One channel. Exactly one of `send` and `recv` is set.
struct Port {
  int peer = 0;
  transport::SendChannel* send = nullptr;
  transport::RecvChannel* recv = nullptr;
  ChannelTicket* ticket_lock = nullptr;
  std::uint64_t ticket = 0;    // this execution owns the channel when ticket_lock->served == ticket
  std::uint32_t last_row = 0;  // the last row that uses the channel
  bool passed_on = false;      // this execution no longer uses the channel
  bool alternate = false;      // this is the second, fourth ... data channel to its peer
  bool exposed = false;        // last_row has run, but the channel still reads memory
  transport::SourceRecord* sources = nullptr;
};

// The optional abilities of a port's channel. Apart from the ports, so that short operations find
// all ports in few cache lines.
struct Abilities {
  transport::SendCapabilities send;
  transport::RecvCapabilities recv;
  const void* memory = nullptr;  // Multicast::memory(); nullptr: each peer gets its own copy
};

// One thread at a time. Ports have the order of the plan's channel table. bind() keeps the capacity
// of earlier calls; no other function allocates.
class Ports {
 public:
  void bind(const plan::Plan& plan, ChannelSource& channels);
  // Takes a ticket of every channel. Requires: all channels of an earlier run are passed on.
  void begin();

  const Port& operator[](std::size_t index) const { return ports_[index]; }
  const Abilities& abilities(std::size_t index) const { return abilities_[index]; }

  // Whether this execution owns all channels of the row.
  bool owns(const plan::Row& row) const;
  // Called when the row has run in the last tile. The next execution gets the channels that no
  // later row of this one uses. A channel that still reads memory of this execution is kept, so
  // that drained() concerns the memory of one execution only.
  void pass_on_behind(const plan::Row& row, std::uint32_t index);
  // Passes on the kept channels that no longer read memory.
  void take_back() {
    if (any_exposed_) look_at_exposed();
  }
  // Called when all rows have run. Passes on the remaining channels; true if none remains.
  [[nodiscard]] bool pass_on_rest();
  // Passes on all channels, whatever they hold or read.
  void drop();

  // Whether a channel may still read this part of the memory that was handed over or exposed.
  bool reads(const std::byte* data, std::size_t bytes) const;
  // The same for any handed-over memory.
  bool reads_any() const;
  // Calls visit(peer) for every peer that still reads memory which was handed over or exposed.
  template <typename Visit>
  void visit_readers(Visit visit) const {
    for (const Port& port : ports_) {
      if (port.send != nullptr && !port.passed_on && !port.send->drained()) visit(port.peer);
    }
  }

 private:
  void add(const plan::Channel& channel, ChannelSource& channels);
  void find_last_rows(const plan::Plan& plan);
  void find_alternates(const plan::Plan& plan);
  void look_at_exposed();

  std::vector<Port> ports_;
  std::vector<Abilities> abilities_;  // by port
  bool any_exposed_ = false;
  bool owned_all_ = false;  // it owned every channel when it began
};

}  // namespace pycoll::executor
