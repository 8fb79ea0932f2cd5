// Memory of the channels that use the host proxy, and the wires of the proxy.
//
// Headers and credits always lie in host memory. Slots lie there, too, unless a wire with regions
// (capabilities.h) leads to the peer. Then the wire's cards read outgoing slots in this rank's
// device memory and write incoming slots there, where driver and card allow it. Each end decides
// for its own slots and informs the other end: a grant names the place of incoming slots. Slots
// that cannot lie in device memory are staged in host memory, with a warning.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/channels/exchange.h"
#include "device/channels/probe.h"
#include "device/channels/upload.h"
#include "device/driver/gpu.h"
#include "device/host_proxy/network_memory.h"
#include "device/host_proxy/proxy.h"
#include "device/memory/channel_memory.h"
#include "device/memory/reserve.h"
#include "transport/capabilities.h"

namespace pycoll::device {

// One thread at a time.
class Proxied {
 public:
  struct Options {
    std::shared_ptr<const Gpu> gpu;
    std::uint32_t rank = 0;
    std::uint32_t size = 1;
    std::vector<std::string> names;    // "host:pid", by rank
    std::vector<std::uint32_t> peers;  // the ranks out of this rank's reach
    // Limit in bytes for host memory and, again, for device memory.
    std::uint64_t memory_max = 0;
    bool direct = true;  // slots may lie in device memory
    // Used by this object alone; closed with it, unless make_host_proxy() has passed them on.
    std::vector<std::shared_ptr<transport::Transport>> wires;
  };

  explicit Proxied(Options options);
  ~Proxied();
  Proxied(const Proxied&) = delete;
  Proxied& operator=(const Proxied&) = delete;

  // Takes memory for channels of `level`, or of a later level where there is less memory; `level`
  // is updated. Requires: the GPU's context is current.
  Status take(const std::function<Shape(std::uint32_t level)>& shape_of, std::uint32_t* level);
  // Lays out the channels and tells peers their places: a collective call over `exchange` by all
  // ranks of the communicator, including those without peers here. Requires: take() succeeded, for
  // a level that is not above the shape's.
  Status agree(const Exchange& exchange, const Shape& shape);
  // Tests the result of agree(), also a collective call: each pair whose wire has cards sends a
  // pattern both ways. `faults` are by rank, alike on all ranks, and empty where nothing went
  // wrong. After a fault the caller makes the channels anew, without cards. Requires: the GPU's
  // context is current.
  Status try_cards(const Exchange& exchange, Upload& upload, Clock& clock,
                   std::vector<std::string>* faults);
  // For users, after agree(): why slots are staged in host memory that could lie on the device, by
  // rank; alike on all ranks. Completes "device 0 of rank 1 ...".
  const std::vector<std::string>& reasons() const { return reasons_; }

  // Both require agree(). Without peers no proxy is made, and the wires are closed.
  Status make_host_proxy(const std::shared_ptr<Clock>& clock,
                         std::unique_ptr<HostProxy>* host_proxy);
  void point(std::span<Port> ports) const;

  // Never reuses the memory: kernels may still run.
  void abandon();

 private:
  static constexpr auto kIn = static_cast<std::size_t>(plan::Direction::kRecv);
  static constexpr auto kOut = static_cast<std::size_t>(plan::Direction::kSend);
  struct Peer {
    std::uint32_t rank = 0;
    transport::Transport* wire = nullptr;   // the wire to the peer
    transport::Regions* regions = nullptr;  // of the wire; nullptr: it leads to no card
    ProxiedMemory host;                     // the host's addresses
    ProxiedMemory device;                   // the kernels' addresses
    std::array<bool, 2> direct{};           // its slots lie on the device, by kIn and kOut
    std::uint64_t region_offset = 0;        // offset of its incoming slots in the region
    bool peer_granted = false;  // the far end's incoming slots lie in the far end's region
  };

  struct Trial;

  static bool leads_to_card(const Peer& peer) { return peer.regions != nullptr; }
  void take_direct(const Shape& shape, bool is_last);
  Status enter(std::uint64_t bytes, bool cards_write);
  std::uint64_t host_bytes(const Shape& shape) const;
  void lay_out();
  Status learn(const std::vector<std::string>& received);
  Status run_trials(std::vector<Trial>& trials, Upload& upload, Clock& clock, std::string* fault);
  void advance(Trial& trial, Upload& upload, std::string* fault);
  Status read_trial(const Trial& trial, const transport::Segment& segment, Upload& upload,
                    bool* agrees) const;
  bool send_trial(const Trial& trial) const;
  bool is_over(const Trial& trial) const;
  std::uint32_t trial_bytes() const;
  Probed find_probed(std::uint32_t writer, const Peer& peer, std::size_t way) const;

  Options options_;
  Shape shape_;
  std::vector<Peer> peers_;
  bool tried_direct_ = false;
  std::string why_;  // why slots of this rank are staged in host memory
  CardOrder order_ = CardOrder::kNone;
  std::vector<std::string> reasons_;
  Reserved memory_;         // host memory
  Reserved device_memory_;  // the region
};

}  // namespace pycoll::device
