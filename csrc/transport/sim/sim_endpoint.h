// One rank's end of the simulated network. Only sim*.cpp include this file. Contract: transport.h.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/sim/sim_world.h"
#include "transport/transport.h"

namespace pycoll::transport {

class SimSendChannel final : public SendChannel {
 public:
  SimSendChannel(SimWorld& world, int from, int to, std::uint32_t number)
      : world_(world), wire_(world.wire(from, to)), number_(number) {}

  std::byte* reserve(std::size_t bytes) override;
  void commit(const SegmentHeader& header) override;
  bool hand_over(const SegmentHeader& header, const std::byte* data) override;
  bool drained() override;

 private:
  SimWorld& world_;
  SimWire& wire_;
  std::uint32_t number_;
};

class SimRecvChannel final : public RecvChannel {
 public:
  SimRecvChannel(SimWorld& world, int from, int to, std::uint32_t number)
      : world_(world), wire_(world.wire(from, to)), number_(number) {}

  const Segment* peek() override;
  void release() override;

 private:
  SimWorld& world_;
  SimWire& wire_;
  std::uint32_t number_;
  Segment head_;
};

class SimLink final : public Link {
 public:
  SimLink(SimWorld& world, int rank, int peer);

  SendChannel& send_channel(std::uint32_t number) override { return sends_.at(number); }
  RecvChannel& recv_channel(std::uint32_t number) override { return recvs_.at(number); }
  void post(const Notice& notice) override;
  Notice newest() override { return world_.wire(peer_, rank_).shown; }
  LinkState state() override { return world_.wire(peer_, rank_).state_shown; }
  std::string reason() const override { return world_.wire(peer_, rank_).reason; }

 private:
  SimWorld& world_;
  int rank_;
  int peer_;
  std::vector<SimSendChannel> sends_;  // by number; created at once, since they hold no memory
  std::vector<SimRecvChannel> recvs_;
};

class SimTransport final : public Transport {
 public:
  SimTransport(std::shared_ptr<SimWorld> world, int rank);
  ~SimTransport() override { SimTransport::close(); }

  std::string_view name() const override { return "sim"; }
  Link* link(int peer) override;
  bool poll() override { return !world_->dead(rank_) && world_->poll(rank_); }
  bool has_new_notices() override {
    (void)poll();
    return true;
  }
  bool arm() override { return world_->quiet(rank_); }
  void disarm() override {}
  int event_fd() const override { return -1; }
  void let_go(LetGo /*what*/) override { world_->let_go(rank_); }
  void close() override { world_->close(rank_); }

 private:
  std::shared_ptr<SimWorld> world_;
  int rank_;
  std::vector<std::unique_ptr<SimLink>> links_;  // by peer; nullptr for this rank
};

}  // namespace pycoll::transport
