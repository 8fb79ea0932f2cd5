// Segments over RDMA: to each peer one or several rails, reliable queue pairs of InfiniBand or RoCE
// over different ports. Every rank registers slots that each peer writes into; a segment is one
// message, or a payload and behind it a message with the header, and the completion of the last one
// is the flag. Layout and rules: VERBS.md.
//
// libibverbs is opened when the first transport is made. Where its header was missing when pycoll
// was built, everything here exists and says so.
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
#include "transport/transport.h"

namespace pycoll::transport {

namespace verbs {
struct Api;

// So much memory of users at once, and so much of it in all, may be registered.
struct RegistrationLimits {
  // An array is registered in pieces of this size, as its parts are used: pinning 16 MiB takes
  // about as long as copying them once.
  std::size_t piece_bytes = std::size_t{16} << 20;
  std::size_t pinned_bytes = 0;
  // A piece is registered once so much was copied from it: to register and deregister what is soon
  // freed takes as long as copying about so much.
  std::size_t copied_bytes = std::size_t{1} << 20;

  // A quarter of the machine's memory in all.
  static RegistrationLimits of_machine();
};

// What is registered now, and how that went.
struct RegistrationFacts {
  std::size_t pinned_bytes = 0;
  std::size_t pieces = 0;
  std::uint64_t made = 0;  // since the beginning
  // Why the device last refused, for users; empty if it never did. From then on no more is pinned
  // than was; a cause other than missing memory ends all registering.
  std::string refusal;
};

}  // namespace verbs

// A place of a rank on an RDMA network: "mlx5_0", its port from 1, the index in the port's table of
// GIDs (the addresses; for RoCE one of version 2).
struct VerbsPort {
  std::string device;
  int port = 1;
  int gid_index = 0;
};

// Empty if this process can use verbs; otherwise why not and what to install.
std::string verbs_missing();

// Threads: as in transport.h. Pins about 4 MiB of memory per prepared peer, and what is sent of
// memory of the arena (shm_arena.h); costs one descriptor per peer, two per port and two of its
// own, beside those of the driver.
class VerbsTransport : public Transport {
 public:
  // How long close() may wait for what is still on its way to peers.
  static constexpr Nanoseconds kCloseLasts = 1'000'000'000;
  // A peer's socket has ended without a goodbye so long: then none is on its way.
  static constexpr Nanoseconds kGoodbyeGrace = 100'000'000;
  // The own device has given up a request so long, and not said why: then it will not.
  static constexpr Nanoseconds kReasonGrace = 1'000'000'000;
  // A port that has told of trouble says nothing of what it is to send for so long: then it will
  // not. Devices that keep to the specification repeat packets for less.
  static constexpr Nanoseconds kSilenceLasts = 8'000'000'000;
  // So long let_go() waits for peers to acknowledge what is sent from memory of users; as long
  // again for the device to let go of it.
  static constexpr Nanoseconds kLetGoLasts = 100'000'000;

  // Opens the ports, at least one. kInvalidArgument for a rank outside [0, size), no port or a
  // device that is not there; kTransport when one cannot be used, with what to do about it.
  static Status create(int rank, int size, const std::vector<VerbsPort>& ports,
                       std::unique_ptr<VerbsTransport>* made);
  // As above over the functions of `api`, which outlives the transport; for tests.
  static Status create(int rank, int size, const std::vector<VerbsPort>& ports,
                       const verbs::Api& api, const verbs::RegistrationLimits& limits,
                       std::unique_ptr<VerbsTransport>* made);

  // Makes queue pairs and memory for `peer`: rail i over number rails[i] of the ports, 1, 2 or 4
  // different ones, and the peer as many in the order that meets them. `address` gets the bytes for
  // its attach(). kInvalidArgument for other rails. Fails with
  // kInvalidArgument for a peer that cannot be or is prepared, with kTransport when the device or
  // the system refuses.
  virtual Status prepare(int peer, const std::vector<int>& rails, std::string* address) = 0;

  // Frees what prepare() made for `peer`, which will not be attached: the two use another medium.
  // No effect on a peer that is attached or was never prepared.
  virtual void forget(int peer) = 0;

  // Connects to the prepared `peer`, whose prepare() gave `address`. `liveness` is a connected
  // stream socket on which no byte is sent: its end means that the peer's process is gone. `name`
  // names the peer in error texts. Ownership of the socket passes in any case. Nothing may be sent
  // before both ends are attached. Fails as prepare(), and when no way leads to the address.
  virtual Status attach(int peer, const std::string& address, UniqueFd liveness,
                        std::string name) = 0;

  // Any thread.
  virtual verbs::RegistrationFacts registered() const = 0;

  // Registers ordinary memory, so that it is sent from where it lies, until as many lapse() with
  // the same arguments; close() ends all. The caller promises that the same pages stay at these
  // addresses until then, and may be written. False where it cannot be registered: it is copied as
  // ever, and registered() tells why. Any thread.
  [[nodiscard]] virtual bool keep(std::byte* data, std::size_t bytes) = 0;
  virtual void lapse(const std::byte* data, std::size_t bytes) = 0;

  std::string_view name() const override { return "verbs"; }
  // A region is registered at every port or at none, counts towards no bound of memory, and is
  // kClosed after close().
  bool has_regions() const override { return true; }
};

}  // namespace pycoll::transport
