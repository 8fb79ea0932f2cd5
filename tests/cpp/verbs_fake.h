// A provider of verbs inside one process, for what real devices are too orderly or too reliable to
// show: the packets of a message, and of the messages behind it, arrive in any order; completions
// come late; peers stop answering; ports go down; memory cannot be pinned. What the specification
// promises holds: messages of a pair complete in order, and with a completion all earlier bytes are
// there.
//
// A thread is the network. It reads and writes the users' memory whenever it likes, so that a
// sanitizer for threads finds every use of memory that is not covered by a completion. Misuse fails
// the test: memory without the right key, receives that are not posted, queues that overflow,
// handles that are not freed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/verbs.h"
#include "transport/verbs_api.h"

namespace pycoll::testing {

class FakeNetwork;

struct FakeOptions {
  std::uint64_t seed = 1;
  std::uint32_t inline_max = 64;  // more is refused, as some devices do
  bool orderly = false;           // packets in order and completions at once
};

// One at a time: the functions of the table know no other way to it. Devices are called "fake0",
// "fake1", ... and have one port. Any thread.
class FakeVerbs {
 public:
  explicit FakeVerbs(const FakeOptions& options);
  // Everything that was made must be freed by then.
  ~FakeVerbs();

  static const transport::verbs::Api& api();
  static transport::VerbsPort port(int device) { return {"fake" + std::to_string(device), 1, 0}; }

  // From now on nobody hears what this device sends, and it hears nobody.
  void cut(int device);
  // The port of the device says that it is down; nothing else changes.
  void tell_port_error(int device);
  // From now on memory cannot be registered: ENOMEM.
  void refuse_memory(bool refuse);
  // Messages that have arrived whole at any peer.
  std::uint64_t messages() const;
  // Messages of which a packet arrived before one of an earlier message or before an earlier one of
  // its own.
  std::uint64_t disordered() const;

 private:
  std::unique_ptr<FakeNetwork> network_;
};

}  // namespace pycoll::testing
