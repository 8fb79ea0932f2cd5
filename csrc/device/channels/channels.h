// The channels between the devices of a communicator's ranks: each rank's channel memory, mapped by
// the ranks that reach it; host memory for the other ranks; and, in this rank's device memory, the
// ports to both.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/channels/exchange.h"
#include "device/channels/post.h"
#include "device/channels/probe.h"
#include "device/channels/proxied.h"
#include "device/channels/reach.h"
#include "device/channels/upload.h"
#include "device/driver/gpu.h"
#include "device/host_proxy/proxy.h"
#include "device/memory/channel_memory.h"
#include "device/memory/reserve.h"

namespace pycoll::device {

// Makes connections between the hosts of all ranks for device channels alone; a collective call,
// which fails on all ranks or on none.
using Wires = std::function<Status(std::vector<std::shared_ptr<transport::Transport>>* wires)>;

// The properties of this rank that it needs to meet the others.
struct Membership {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  std::vector<std::string> names;  // "host:pid"
  // Equal for ranks of one machine, and of one process, and different for all others.
  std::uint64_t machine = 0;
  std::uint64_t process = 0;
  // Limit in bytes for channels on this rank's device. The same limit holds again for channels to
  // peers out of reach, in host memory, or in device memory where network cards reach it.
  std::uint64_t memory_max = 128ull << 20;
  // The protocol of collectives of all sizes, alike on all ranks; if empty, the size decides.
  std::optional<Protocol> only;
  bool direct = true;  // network cards may use device memory
  // Called on all ranks where some pair of ranks is out of reach.
  Wires wires;
};

// One thread at a time.
class Channels {
 public:
  // A collective call over `exchange`. kMismatch where ranks have different settings for the
  // protocol, kTransport where there is no memory for the smallest channels, or the failure of
  // Membership::wires; the same on all ranks.
  static Status open(const std::shared_ptr<const Gpu>& gpu, const Membership& mine,
                     const Exchange& exchange, Upload& upload, const std::shared_ptr<Clock>& clock,
                     std::unique_ptr<Channels>* channels);
  // Requires: no kernel of this rank uses the channels.
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  const Shape& shape() const { return shape_; }
  // Blocks that each rank may have at once; alike on all ranks.
  std::uint32_t blocks() const { return blocks_; }
  // Ranks on this rank's device, itself included.
  std::uint32_t sharing() const { return sharing_; }
  // Whether this rank's kernels write to the memory of rank `rank`.
  bool reaches(std::uint32_t rank) const { return rank != mine_.rank && bases_[rank] != nullptr; }
  // Whether rank `rank` is a thread of this process.
  bool is_thread(std::uint32_t rank) const { return same_process_[rank]; }
  // The other ranks on this rank's device that are threads of this process.
  const std::vector<int>& neighbours() const { return neighbours_; }
  // A number of this communicator: equal on its ranks, and different from that of all other
  // communicators of this process.
  std::uint64_t group() const { return group_; }
  // The membership's `only`.
  [[nodiscard]] std::optional<Protocol> only() const { return mine_.only; }
  // Some pair of ranks is out of reach, so that every operation uses Protocol::kSimple; alike on
  // all ranks.
  bool some_proxied() const { return some_proxied_; }
  // Moves segments between this rank and ranks out of its reach; nullptr if there are none. The
  // caller starts it.
  HostProxy* host_proxy() const { return host_proxy_.get(); }
  // For users: why pairs are out of reach that should reach each other; alike on all ranks.
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Never reuses the memory: kernels may still run.
  void abandon();
  // The address of entry `index` of make_ports().
  Address port(std::uint32_t index) const { return ports_.address() + index * sizeof(Port); }

 private:
  struct ChannelMemory;
  struct Introduction;
  struct Offer;

  Channels(std::shared_ptr<const Gpu> gpu, Membership mine);
  Status introduce(const Exchange& exchange);
  Status judge(const std::vector<Introduction>& all);
  Status compare(const std::vector<Introduction>& all) const;
  struct Mapped {
    Address address;
    std::size_t bytes;
    bool shared;
  };
  Status meet(const Exchange& exchange, Upload& upload, Reserved::Kind kind, Findings* found);
  void forget();
  Status allocate(Reserved::Kind kind, Offer* offer);
  void offer_memory(Reserved::Kind kind, Offer* offer);
  Status offer_descriptor(Offer* offer);
  void take_descriptors(const std::vector<Offer>& all);
  Status attach(const std::vector<Offer>& all, Upload& upload);
  Finding attach_one(std::uint32_t peer, const Offer& offer);
  Status map_process(std::uint32_t peer, const Offer& offer, Address* address);
  Probed find_probed(std::uint32_t writer, std::uint32_t owner) const;
  Status verify(const Findings& all, Upload& upload);
  Status find_out(const Exchange& exchange, Status status, Upload& upload, Findings* all);
  Status connect_proxied(const Exchange& exchange, const Findings& all, Upload& upload,
                         const std::shared_ptr<Clock>& clock);
  Status meet_over_wires(const Exchange& exchange, const std::vector<std::uint32_t>& peers,
                         bool direct);
  void warn_of(const std::vector<std::string>& reasons);
  Status make(Upload& upload);
  Status connect(const Exchange& exchange, Upload& upload, const std::shared_ptr<Clock>& clock);

  std::shared_ptr<const Gpu> gpu_;
  Membership mine_;
  Shape shape_;
  std::uint32_t level_ = 0;  // how often the shape was made smaller
  std::uint32_t blocks_ = 0;
  std::uint32_t sharing_ = 1;
  std::uint64_t group_ = 0;
  std::uint64_t first_process_ = 0;  // of rank 0
  bool all_share_ = true;            // all devices have descriptors for their memory
  std::vector<int> neighbours_;
  std::vector<bool> same_machine_;  // by rank
  std::vector<bool> same_process_;
  std::vector<int> ordinals_;         // of ranks of this process
  std::vector<Uuid> uuids_;           // of their devices
  std::vector<std::string> devices_;  // names of the devices, for texts
  std::shared_ptr<ChannelMemory> channel_memory_;
  // Of threads: their memory lives as long as this rank's.
  std::vector<std::shared_ptr<ChannelMemory>> others_;
  std::vector<Mapped> mapped_;  // of processes
  std::unique_ptr<Post> post_;
  UniqueFd descriptor_;                // of channel memory, if peers map it by a descriptor
  std::vector<UniqueFd> descriptors_;  // of processes' channel memory, by rank
  // By rank, as kernels see it; nullptr where kernels do not write.
  std::vector<std::byte*> bases_;
  std::vector<Finding> findings_;  // by rank
  std::vector<std::string> warnings_;
  bool some_proxied_ = false;
  std::unique_ptr<Proxied> proxied_;  // where some rank is out of another rank's reach
  Reserved ports_;
  // Declared last: its thread ends before its memory does.
  std::unique_ptr<HostProxy> host_proxy_;
};

}  // namespace pycoll::device
