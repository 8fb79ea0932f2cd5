// The registered arrays of a communicator: a registry that reuses a number only after every launch
// that may know it has ended.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/channels/channels.h"
#include "device/channels/exchange.h"
#include "device/channels/registry.h"
#include "device/driver/gpu.h"
#include "device/marks.h"
#include "device/watch.h"
#include "device/watch_thread.h"

namespace pycoll::device {

// Threads: any, at any time.
class RegisteredArrays {
 public:
  // A mark behind the last launched operation outside of captures, or nullptr. A launch in progress
  // ends first.
  using Last = std::function<std::shared_ptr<Mark>()>;
  // Objects of the communicator; they outlive the arrays.
  struct Parts {
    const Channels& channels;
    const Membership& membership;
    const WatchThread& watch_thread;
    const Marks& marks;
  };

  RegisteredArrays(std::shared_ptr<const Gpu> gpu, const Parts& parts, const Words& words,
                   Last last);

  // Registers arrays that peers may write results to; see registry.h. A collective call.
  Status enter(const Exchange& exchange, const std::vector<Registry::Array>& arrays,
               std::vector<Registry::Entered>* entered);
  // Ends the registration of the arrays of that number for later launches. Must be called once.
  Status lapse(std::uint32_t number);
  // Lapsed numbers to whose arrays no peer writes any more, so that the caller may release the
  // arrays; each is returned once. None after a failure: a peer that does not know of the lapse may
  // still write.
  std::vector<std::uint32_t> let_go();

  const Registry& registry() const { return registry_; }
  // Never reuses the table: kernels may still run.
  void abandon() { registry_.abandon(); }

 private:
  bool is_quiet_since(std::uint32_t number);

  // The work that may still know a number when it lapsed: launched operations, and running blocks
  // by their beats, which include those of graphs.
  struct Lapsed {
    std::shared_ptr<Mark> behind;
    std::vector<std::uint32_t> beats;
  };

  const std::shared_ptr<const Gpu> gpu_;
  const WatchThread& watch_thread_;
  const Marks& marks_;
  const Words words_;
  const Last last_;
  Registry registry_;
  std::mutex lapsing_;  // guards lapsed_; locked before all locks of launches
  std::array<Lapsed, kRegisteredMax> lapsed_;
};

}  // namespace pycoll::device
