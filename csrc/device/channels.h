// The channels between the devices of all ranks of a communicator: each rank's arena, as the ranks
// that reach it write there, memory of the host for those that do not, and the ports to both in
// this rank's device memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/arena.h"
#include "device/carried.h"
#include "device/carrier.h"
#include "device/exchange.h"
#include "device/gpu.h"
#include "device/post.h"
#include "device/probe.h"
#include "device/reach.h"
#include "device/reserve.h"
#include "device/upload.h"

namespace pycoll::device {

// Connections between the hosts of all ranks for this alone; a collective call, which fails on all
// ranks or on none.
using Wires = std::function<Status(std::vector<std::shared_ptr<transport::Transport>>* wires)>;

// What a rank must know of itself to meet the others.
struct Membership {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  std::vector<std::string> names;  // "host:pid"
  // Equal for ranks of one machine, and of one process, and of no other.
  std::uint64_t machine = 0;
  std::uint64_t process = 0;
  // Of channels on this rank's device, at most, and again of the host or, where network cards reach
  // it, of the device, for peers out of reach.
  std::uint64_t memory_max = 128ull << 20;
  // What collectives use whatever their size, alike on all ranks; if nothing, what fits it.
  std::optional<Protocol> only;
  bool direct = true;  // network cards may use device memory
  // Called where some pair of ranks is out of reach.
  Wires wires;
};

// One thread at a time.
class Channels {
 public:
  // A collective call over `exchange`. kMismatch where ranks were told to use different protocols,
  // kTransport where there is not even memory for the smallest channels, or as the membership's
  // wires; either on all ranks.
  static Status open(const std::shared_ptr<const Gpu>& gpu, const Membership& mine,
                     const Exchange& exchange, Upload& upload, const std::shared_ptr<Clock>& clock,
                     std::unique_ptr<Channels>* channels);
  // Requires: no kernel of this rank uses them.
  ~Channels();
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  const Shape& shape() const { return shape_; }
  // Blocks that each rank may have at once; alike on all ranks.
  std::uint32_t blocks() const { return blocks_; }
  // Ranks on this rank's device, itself included.
  std::uint32_t sharing() const { return sharing_; }
  // Whether this rank's kernels write to the memory of that one.
  bool reaches(std::uint32_t rank) const { return rank != mine_.rank && arenas_[rank] != nullptr; }
  // Whether that rank is a thread of this process.
  bool is_thread(std::uint32_t rank) const { return same_process_[rank]; }
  // Other ranks on it that are threads of this process.
  const std::vector<int>& neighbours() const { return neighbours_; }
  // The same on all ranks, and different from that of all other communicators of this process.
  std::uint64_t group() const { return group_; }
  // As the membership says.
  [[nodiscard]] std::optional<Protocol> only() const { return mine_.only; }
  // Some pair of ranks is out of reach, so that only Protocol::kSimple is for all; alike on all.
  bool some_carried() const { return some_carried_; }
  // Carries between this rank and those out of its reach; nullptr if there are none. To be started.
  Carrier* carrier() const { return carrier_.get(); }
  // For users: why pairs are out of reach that should not be; alike on all ranks.
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Nobody may ever use the memory again: kernels would not end.
  void abandon();
  // Where entry `index` of make_ports() lies.
  Address port(std::uint32_t index) const { return ports_.address() + index * sizeof(Port); }

 private:
  struct Arena;
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
  void offer_arena(Reserved::Kind kind, Offer* offer);
  Status offer_descriptor(Offer* offer);
  void take_descriptors(const std::vector<Offer>& all);
  Status attach(const std::vector<Offer>& all, Upload& upload);
  Finding attach_one(std::uint32_t peer, const Offer& offer);
  Status map_process(std::uint32_t peer, const Offer& offer, Address* address);
  Probed probed(std::uint32_t writer, std::uint32_t owner) const;
  Status verify(const Findings& all, Upload& upload);
  Status find_out(const Exchange& exchange, Status status, Upload& upload, Findings* all);
  Status carry(const Exchange& exchange, const Findings& all, Upload& upload,
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
  std::vector<std::string> devices_;  // the same in words
  std::shared_ptr<Arena> arena_;
  std::vector<std::shared_ptr<Arena>> others_;  // of threads: their memory lives as long as ours
  std::vector<Mapped> mapped_;                  // of processes
  std::unique_ptr<Post> post_;
  UniqueFd descriptor_;                // of the arena, if it is shared by one
  std::vector<UniqueFd> descriptors_;  // of processes' arenas, by rank
  std::vector<std::byte*> arenas_;     // by rank, for kernels; nullptr where they do not write
  std::vector<Finding> findings_;      // by rank
  std::vector<std::string> warnings_;
  bool some_carried_ = false;
  std::unique_ptr<Carried> carried_;  // where there is a rank out of another one's reach
  Reserved ports_;
  std::unique_ptr<Carrier> carrier_;  // its thread ends before its memory does
};

}  // namespace pycoll::device
