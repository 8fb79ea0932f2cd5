// Segments over RDMA. Each peer is reached over one or several rails: reliable queue pairs of
// InfiniBand or RoCE over different ports. Every rank registers slots, and each peer writes into
// its own. A segment is one message, or a payload followed by a message with the header. The
// completion of the last message signals that the segment is complete. VERBS.md specifies layout
// and rules.
//
// The first transport opens libibverbs. In a build without its header, all functions here exist and
// report that it is missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "transport/capabilities.h"
#include "transport/verbs/verbs_options.h"

namespace pycoll::transport {

namespace verbs {
struct Api;
}

// Empty if this process can use verbs; otherwise the reason and what to install.
std::string verbs_missing();

// Threads: as in transport.h. Pins about 8 MiB of memory per prepared peer (an area of 4 MiB for
// each direction), and arena memory (shm_arena.h) that is sent. Uses one descriptor per peer, two
// per port and two of its own, in addition to those of the driver.
class VerbsTransport : public Transport, public Regions {
 public:
  // Longest wait of close() for messages that are on their way to peers.
  static constexpr Nanoseconds kCloseLasts = 1'000'000'000;
  // Wait of let_go() for peers to acknowledge sends from user memory. let_go() then waits as long
  // again until the device no longer reads that memory.
  static constexpr Nanoseconds kLetGoLasts = 100'000'000;

  // Opens the ports, at least one. Fails with kInvalidArgument for a rank outside [0, size), no
  // port or an unknown device. Fails with kTransport, with advice, if a port cannot be used.
  static Status create(int rank, int size, const std::vector<VerbsPort>& ports,
                       std::unique_ptr<VerbsTransport>* made);
  // As above over the functions of `api`, which outlives the transport; for tests.
  static Status create(int rank, int size, const std::vector<VerbsPort>& ports,
                       const verbs::Api& api, const verbs::RegistrationLimits& limits,
                       std::unique_ptr<VerbsTransport>* made);

  // Makes queue pairs and memory for `peer`. Rail i uses port number rails[i]; there are 1, 2 or 4
  // different numbers. The peer calls prepare() with the matching ports in the same order.
  // `address` receives the bytes for the peer's attach(). Fails with kInvalidArgument for other
  // rails and for a peer that is invalid or already prepared, with kTransport if the device or the
  // system refuses.
  virtual Status prepare(int peer, const std::vector<int>& rails, std::string* address) = 0;

  // Frees the result of prepare() for a `peer` that will use another medium. No effect on a peer
  // that is attached or was never prepared.
  virtual void forget(int peer) = 0;

  // Connects to the prepared `peer`, whose prepare() returned `address`. `liveness` is a connected
  // stream socket that carries no bytes: its end means that the peer's process is gone. `name`
  // names the peer in error texts. Takes ownership of the socket in every case. Neither end may
  // send before both are attached. Fails as prepare(), and if the address cannot be reached.
  virtual Status attach(int peer, const std::string& address, UniqueFd liveness,
                        std::string name) = 0;

  // The state of all registrations, summed over the ports. Any thread.
  virtual verbs::RegistrationFacts registration_facts() const = 0;

  // Registers ordinary memory, so that it is sent without a copy. The registration ends after as
  // many calls of lapse() with the same arguments, or with close(). The caller promises that the
  // same pages stay at these addresses until then, and may be written. Returns false if the memory
  // cannot be registered: it is then sent by copies, and registration_facts() has the reason. Any
  // thread.
  [[nodiscard]] virtual bool keep(std::byte* data, std::size_t bytes) = 0;
  virtual void lapse(const std::byte* data, std::size_t bytes) = 0;

  std::string_view name() const override { return "verbs"; }
  // A region is registered at every port or at none and counts towards no memory bound. enter()
  // fails with kClosed after close().
  TransportCapabilities capabilities() override { return {.regions = this}; }
};

}  // namespace pycoll::transport
