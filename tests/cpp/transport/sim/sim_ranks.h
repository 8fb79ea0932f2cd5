// A simulated network under short names, for its tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/prng.h"
#include "tests/cpp/support/check.h"
#include "transport/sim/sim.h"

namespace pycoll::testing {

using transport::kChannelDepth;
using transport::kChannelsMax;
using transport::Link;
using transport::LinkState;
using transport::Notice;
using transport::RecvChannel;
using transport::Segment;
using transport::SegmentHeader;
using transport::SendChannel;
using transport::SimCut;
using transport::SimDeath;
using transport::SimNetwork;
using transport::SimOptions;
using transport::to_text;
using transport::Transport;

inline SimOptions plain(int size) {
  SimOptions options;
  options.size = size;
  return options;
}

// The ranks of a network under short names.
struct Ranks {
  explicit Ranks(const SimOptions& options) : network(options) {}

  Transport& at(int rank) { return *network.transport(rank); }
  Link& link(int rank, int peer) { return *at(rank).link(peer); }
  SendChannel& send(int from, int to, std::uint32_t number = 0) {
    return link(from, to).send_channel(number);
  }
  RecvChannel& recv(int from, int to, std::uint32_t number = 0) {
    return link(to, from).recv_channel(number);
  }
  Nanoseconds now() { return network.clock()->now(); }
  void poll_all() {
    for (int rank = 0; rank < network.options().size; ++rank) at(rank).poll();
  }
  // Until no event is left, everybody polling in between.
  void settle() {
    while (network.advance()) poll_all();
  }

  SimNetwork network;
};

inline SegmentHeader header_of(std::uint64_t sequence, std::size_t bytes) {
  return {sequence, sequence * 31, static_cast<std::uint32_t>(bytes), 0};
}

inline void fill(std::byte* data, std::size_t bytes, std::uint64_t key) {
  Prng prng(key);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = std::byte(prng.next() >> 56);
}

inline bool send_one(SendChannel& channel, std::uint64_t sequence, std::size_t bytes) {
  std::byte* slot_buffer = channel.reserve(bytes);
  if (slot_buffer == nullptr) return false;
  fill(slot_buffer, bytes, sequence);
  channel.commit(header_of(sequence, bytes));
  return true;
}

}  // namespace pycoll::testing
