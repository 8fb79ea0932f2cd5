// Segments over RDMA. Each peer is reached over one or several rails: reliable queue pairs of
// InfiniBand or RoCE over different ports. Every rank registers slots, and each peer writes into
// its own. A segment is one message, or a payload followed by a message with the header. The
// completion of the last message signals that the segment is complete. VERBS.md specifies layout
// and rules.
//
// The first transport opens libibverbs. In a build without its header, all functions here exist and
// report that.
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

namespace pycoll::transport {

namespace verbs {
struct Api;

// Bounds on the registration of user memory.
struct RegistrationLimits {
  // An array is registered in pieces of this size, as its parts are used. Pinning a piece costs
  // about as much as copying it once.
  std::size_t piece_bytes = std::size_t{16} << 20;
  std::size_t pinned_bytes = 0;
  // A piece is registered once this many bytes have been copied from it. Registering and
  // deregistering memory that is soon freed costs about as much as these copies.
  std::size_t copied_bytes = std::size_t{1} << 20;

  // Sets pinned_bytes to a quarter of the machine's memory.
  static RegistrationLimits of_machine();
};

// The state of the registrations.
struct RegistrationFacts {
  std::size_t pinned_bytes = 0;
  std::size_t pieces = 0;
  std::uint64_t made = 0;  // registrations since the transport was opened
  // Why the device last refused a registration, for users; empty if it never did. If it refused
  // arena memory for lack of memory, the amount pinned at that moment becomes the bound. After any
  // other refusal of arena memory nothing more is registered.
  std::string refusal;
};

}  // namespace verbs

// A port of an RDMA device: the device's name ("mlx5_0"), the port number from 1, and the index of
// an address in the port's GID table (for RoCE an address of version 2).
struct VerbsPort {
  std::string device;
  int port = 1;
  int gid_index = 0;
};

// Empty if this process can use verbs; otherwise the reason and what to install.
std::string verbs_missing();

// Threads: as in transport.h. Pins about 8 MiB of memory per prepared peer (an area of 4 MiB for
// each direction), and arena memory (shm_arena.h) that is sent. Uses one descriptor per peer, two
// per port and two of its own, in addition to those of the driver.
class VerbsTransport : public Transport, public Regions {
 public:
  // Longest wait of close() for messages that are on their way to peers.
  static constexpr Nanoseconds kCloseLasts = 1'000'000'000;
  // Wait for a goodbye after a peer's socket has ended. A goodbye that has not arrived by then was
  // not sent.
  static constexpr Nanoseconds kGoodbyeGrace = 100'000'000;
  // Wait for this rank's own device to report why it gave up a request.
  static constexpr Nanoseconds kReasonGrace = 1'000'000'000;
  // Wait for completions of a port that has reported an error. Devices that keep to the
  // specification give up within less.
  static constexpr Nanoseconds kSilenceLasts = 8'000'000'000;
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
