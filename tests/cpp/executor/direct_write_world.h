// A world of executions over real shared memory that counts what was put where it belongs. All
// ranks are stepped by one thread.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "base/cache.h"
#include "executor/execution.h"
#include "tests/cpp/transport/shm/shm_fixture.h"

namespace pycoll::testing {

// Counts the segments that were written directly.
class Counted final : public transport::RecvChannel {
 public:
  explicit Counted(transport::RecvChannel& channel) : channel_(&channel) {}
  const transport::Segment* peek() override { return channel_->peek(); }
  transport::RecvCapabilities capabilities() override { return channel_->capabilities(); }
  void release() override {
    direct_writes_ += peek()->written_directly ? 1 : 0;
    channel_->release();
  }
  int direct_writes() const { return direct_writes_; }

 private:
  transport::RecvChannel* channel_;
  int direct_writes_ = 0;
};

class Channels final : public executor::ChannelSource {
 public:
  Channels(transport::Transport& transport, int size) : transport_(&transport), size_(size) {}
  transport::SendChannel& send_channel(int peer, std::uint32_t number) override {
    return transport_->link(peer)->send_channel(number);
  }
  transport::RecvChannel& recv_channel(int peer, std::uint32_t number) override {
    auto& channel = transport_->link(peer)->recv_channel(number);
    return counted_.try_emplace({peer, number}, channel).first->second;
  }
  executor::ChannelTicket& send_ticket(int peer, std::uint32_t number) override {
    return turns_[{true, {peer, number}}];
  }
  executor::ChannelTicket& recv_ticket(int peer, std::uint32_t number) override {
    return turns_[{false, {peer, number}}];
  }
  std::uint64_t& traversals() override { return traversals_; }
  std::size_t uncached_bytes() const override {
    return pycoll::uncached_bytes(static_cast<std::size_t>(size_));
  }
  bool is_dropped(std::uint64_t /*sequence*/) const override { return false; }
  int direct_writes() const {
    int all = 0;
    for (const auto& [number, channel] : counted_) all += channel.direct_writes();
    return all;
  }

 private:
  using PeerChannel = std::pair<int, std::uint32_t>;
  transport::Transport* transport_;
  int size_;
  std::map<PeerChannel, Counted> counted_;
  std::map<std::pair<bool, PeerChannel>, executor::ChannelTicket> turns_;
  std::uint64_t traversals_ = 0;
};

class World {
 public:
  explicit World(int size) : fixture_(size, {}), size_(size) {
    for (int rank = 0; rank < size; ++rank) channels_.emplace_back(fixture_.at(rank), size);
  }

  int size() const { return size_; }
  Channels& at(int rank) { return channels_[static_cast<std::size_t>(rank)]; }
  int direct_writes() const {
    int all = 0;
    for (const Channels& one : channels_) all += one.direct_writes();
    return all;
  }

 private:
  ShmFixture fixture_;
  int size_;
  std::vector<Channels> channels_;
};

}  // namespace pycoll::testing
