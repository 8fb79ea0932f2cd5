// The conformance suite of transport/transport.h and capabilities.h: one list of cases, compiled
// once, for every medium. A medium's test is a Fixture and
//
//   const Conformance suite({"", true, make_my_fixture, {.multicast = true}});
//   RUN_TESTS()
//
// Every case is registered under its own name. The cases about sleeping stand for media with
// descriptors only: a medium on a virtual clock has no event_fd() to sleep on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tests/cpp/support/check.h"
#include "transport/transport.h"

namespace pycoll::conformance {

// Transports of one medium, every pair of them linked. The destructor frees everything, whatever
// was closed or killed before.
class Fixture {
 public:
  virtual ~Fixture() = default;

  virtual transport::Transport& at(int rank) = 0;
  // Segments that a channel holds.
  virtual std::uint64_t depth() const { return transport::kChannelDepth; }
  // Nothing moved: a virtual clock goes on, others do nothing.
  virtual void idle() {}
  // The rank vanishes as if its process had been killed: no notice, no close(); at(rank) is not
  // used afterwards.
  virtual void kill(int rank) = 0;
};

// The abilities of transport/capabilities.h that a medium has; the suite checks that it has no
// other.
struct Abilities {
  bool store_hints = false;
  bool sources = false;
  bool zero_copy = false;
  bool withdrawal = false;     // ZeroCopyReceiver
  bool direct_writes = false;  // DirectWriter and WriteWindows
  bool multicast = false;
  bool regions = false;  // RegionSender and Regions
  bool core_hints = false;
  bool output = false;
  bool shows_without_poll = false;
};

struct Medium {
  std::string prefix;  // leads the names of its cases
  // Ranks may run on threads of their own and can sleep; false: one thread, a virtual clock,
  // event_fd() is -1.
  bool threads;
  // `size` transports; seed for a simulated medium, others ignore it.
  std::function<std::unique_ptr<Fixture>(int size, std::uint64_t seed)> make;
  Abilities has = {};
  // As many variants of one transport are tested: they share the rounds of long races.
  std::uint64_t variants = 1;
  // How long a case waits for an event; 0: far longer than a loaded machine needs.
  Nanoseconds patience = 0;
};

// Registers every case for `medium` before main() begins.
struct Conformance {
  explicit Conformance(const Medium& medium);
};

}  // namespace pycoll::conformance
