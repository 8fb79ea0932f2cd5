// Memory of the channels that the host carries, and the wires that it carries them over.
//
// Headers and credits always lie in memory of the host. Slots lie there too, but for peers to whom
// a wire with regions leads (transport.h): then the wire's cards read outgoing slots in this rank's
// device memory, and write incoming ones there, where driver and card allow it. Each end decides
// for its own slots, and tells the other: a grant says where incoming ones lie. What cannot be is
// staged in memory of the host, with a warning.
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
#include "device/arena.h"
#include "device/carrier.h"
#include "device/exchange.h"
#include "device/gpu.h"
#include "device/network_memory.h"
#include "device/probe.h"
#include "device/reserve.h"
#include "device/upload.h"
#include "transport/transport.h"

namespace pycoll::device {

// One thread at a time.
class Carried {
 public:
  struct Options {
    std::shared_ptr<const Gpu> gpu;
    std::uint32_t rank = 0;
    std::uint32_t size = 1;
    std::vector<std::string> names;    // "host:pid", by rank
    std::vector<std::uint32_t> peers;  // out of this rank's reach
    // Of the host and, again, of the device, at most.
    std::uint64_t memory_max = 0;
    bool direct = true;  // slots may lie in device memory
    // Nobody else uses them; closed with this, unless make_carrier() has passed them on.
    std::vector<std::shared_ptr<transport::Transport>> wires;
  };

  explicit Carried(Options options);
  ~Carried();
  Carried(const Carried&) = delete;
  Carried& operator=(const Carried&) = delete;

  // Takes memory for channels of `level`, or of a smaller one where there is less, which `level`
  // then is. Requires: the GPU's context is current.
  Status take(const std::function<Shape(std::uint32_t level)>& shape_of, std::uint32_t* level);
  // Lays out the channels and tells peers where they lie; a collective call over `exchange`, which
  // all ranks of the communicator make, also those with no peers here. Requires: take() went well,
  // for a level that is not above the shape's.
  Status agree(const Exchange& exchange, const Shape& shape);
  // Tries what agree() agreed, a collective call as well: each pair whose wire has cards sends a
  // pattern both ways. `faults` are by rank, alike on all: what went wrong, or nothing. After a
  // fault channels are to be made anew, without cards. Requires: the GPU's context is current.
  Status try_cards(const Exchange& exchange, Upload& upload, Clock& clock,
                   std::vector<std::string>* faults);
  // For users, as of agree(): why slots are staged that could lie on the device, by rank; alike on
  // all ranks. Completes "device 0 of rank 1 ...".
  const std::vector<std::string>& reasons() const { return reasons_; }

  // Both require agree(). Where there are no peers, no carrier is made, and the wires are closed.
  Status make_carrier(const std::shared_ptr<Clock>& clock, std::unique_ptr<Carrier>* carrier);
  void point(std::span<Port> ports) const;

  // Nobody may ever use the memory again: kernels would not end.
  void abandon();

 private:
  static constexpr auto kIn = static_cast<std::size_t>(plan::Direction::kRecv);
  static constexpr auto kOut = static_cast<std::size_t>(plan::Direction::kSend);
  struct Peer {
    std::uint32_t rank = 0;
    transport::Transport* wire = nullptr;  // that leads there
    CarriedMemory host;                    // as the host finds it
    CarriedMemory device;                  // as kernels do
    std::array<bool, 2> direct{};          // its slots lie on the device, by kIn and kOut
    std::uint64_t lands_at = 0;            // its incoming slots, in the region
    bool places = false;                   // the far end's incoming slots lie in its region
  };

  struct Trial;

  static bool leads_to_card(const Peer& peer) {
    return peer.wire != nullptr && peer.wire->has_regions();
  }
  void take_direct(const Shape& shape, bool is_last);
  Status enter(std::uint64_t bytes, bool lands);
  std::uint64_t host_bytes(const Shape& shape) const;
  void lay_out();
  Status learn(const std::vector<std::string>& told);
  Status run_trials(std::vector<Trial>& trials, Upload& upload, Clock& clock, std::string* fault);
  void advance(Trial& trial, Upload& upload, std::string* fault);
  Status read_trial(const Trial& trial, const transport::Segment& segment, Upload& upload,
                    bool* agrees) const;
  bool send_trial(const Trial& trial) const;
  bool is_over(const Trial& trial) const;
  std::uint32_t trial_bytes() const;
  Probed probed(std::uint32_t writer, const Peer& peer, std::size_t way) const;

  Options options_;
  Shape shape_;
  std::vector<Peer> peers_;
  bool tried_direct_ = false;
  std::string why_;  // slots of this rank are staged
  CardOrder order_ = CardOrder::kNone;
  std::vector<std::string> reasons_;
  Reserved memory_;         // of the host
  Reserved device_memory_;  // the region
};

}  // namespace pycoll::device
