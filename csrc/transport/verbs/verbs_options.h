// Names of ports, bounds and waits of the verbs transport. Needs no header of libibverbs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"

namespace pycoll::transport {

// A port of an RDMA device: the device's name ("mlx5_0"), the port number from 1, and an index in
// the port's GID table. For RoCE the entry must be an address of version 2.
struct VerbsPort {
  std::string device;
  int port = 1;
  int gid_index = 0;
};

namespace verbs {

// Wait for a goodbye after a peer's socket has ended. A goodbye that has not arrived by then was
// not sent.
inline constexpr Nanoseconds kGoodbyeGrace = 100'000'000;
// Wait for this rank's own device to report why it gave up a request.
inline constexpr Nanoseconds kReasonGrace = 1'000'000'000;
// Wait for completions of a port that has reported an error. Devices that keep to the
// specification give up within less.
inline constexpr Nanoseconds kSilenceLasts = 8'000'000'000;

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
}  // namespace pycoll::transport
