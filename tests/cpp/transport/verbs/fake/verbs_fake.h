// A provider of verbs inside one process, for what real devices are too orderly or too reliable to
// show: the packets of a message, and of the messages behind it, arrive in any order; completions
// come late; peers stop answering; ports go down; memory cannot be pinned. What the specification
// promises holds: messages of a pair complete in order, and with a completion all earlier bytes are
// there. Between pairs there is no order, and now and then all of a device stands still for as long
// as anything moves elsewhere.
//
// A thread is the network. It reads and writes the users' memory whenever it likes, so that a
// sanitizer for threads finds every use of memory that is not covered by a completion. Misuse fails
// the test: memory without the right key, receives that are not posted, queues that overflow,
// handles that are not freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/verbs/library/verbs_api.h"
#include "transport/verbs/verbs.h"

namespace pycoll::testing {

class FakeNetwork;

// Devices whose memory cards reach, as their driver has it; see cuda_fake.h. Numbers of devices are
// from 0; -1 is none.
struct FakeCards {
  int (*device_of_descriptor)(int descriptor);
  int (*device_of_address)(const void* address, std::size_t bytes);
  int (*registers_addresses)();  // as with nvidia-peermem
  // What a card writes comes this way, and is there at last when settle() returns.
  void (*write)(int device, void* to, const void* from, std::size_t bytes);
  void (*settle)(int device);

  // From a library that is open in this process; fails the test if it is none of these.
  static FakeCards of(void* library);
};

struct FakeOptions {
  std::uint64_t seed = 1;
  std::uint32_t inline_max = 64;  // more is refused, as some devices do
  bool orderly = false;           // packets in order and completions at once
};

// One at a time: the functions of the table know no other way to it. Devices are called "fake0",
// "fake1", ... and have two ports. Any thread.
class FakeVerbs {
 public:
  explicit FakeVerbs(const FakeOptions& options);
  // Everything that was made must be freed by then.
  ~FakeVerbs();

  static const transport::verbs::Api& api();
  // As of a library that cannot register memory of devices.
  static const transport::verbs::Api& old_api();
  static transport::VerbsPort port(int device, int number = 1) {
    return {"fake" + std::to_string(device), number, 0};
  }

  // From now on nobody hears what this device sends, and it hears nobody.
  void cut(int device);
  // From now on this device gives up what it is to send, with an error of its own.
  void break_sends(int device);
  // A port of the device says that it is down; nothing else changes.
  void tell_port_error(int device, int port = 1);
  // From now on cards write to the memory of these devices.
  void reach(const FakeCards& cards);
  // From now on this device registers no memory of other devices; a dma-buf of the tests is a
  // memfd.
  void refuse_dmabufs(int device);
  // From now on no more than `beyond` what is registered now can be: `error`; 0: as before.
  void refuse_memory(int error, std::size_t beyond = 0);
  // How many times memory was refused.
  int refusals() const;
  // Whether children of a fork get copies of what is registered, as on Linux from 5.12 on; if not,
  // as at first, they get none of it.
  void copy_at_fork(bool copy);
  // While held, this device sends as ever but does not tell what it has sent.
  void hold_completions(int device, bool hold);
  // From now on messages that are to say `from` in their immediate value say `to`.
  void rewrite(std::uint32_t from, std::uint32_t to);
  // While stalled, nothing that this device sends gets anywhere, and it does not give up.
  void stall(int device, bool stall);
  std::size_t registered_bytes() const;
  // Bytes of payloads, of 1 KiB or more, that devices were told to read from this memory, or from
  // anywhere.
  std::uint64_t sent_from(const std::byte* begin, std::size_t bytes) const;
  std::uint64_t sent_bytes() const;
  // Bytes that devices wrote into memory of other devices, or into a dma-buf, and that they were
  // told to read there.
  std::uint64_t directly_written_bytes() const;
  std::uint64_t taken_bytes() const;
  // Bytes of payloads, of 1 KiB or more, that devices were told to read in other memory.
  std::uint64_t hosts_bytes() const;
  // The same by the port that they left over.
  std::uint64_t sent_over(int device, int port) const;
  // Messages that have arrived whole at any peer.
  std::uint64_t messages() const;
  // Messages of which a packet arrived before one of an earlier message or before an earlier one of
  // its own.
  std::uint64_t disordered() const;

 private:
  std::unique_ptr<FakeNetwork> network_;
};

}  // namespace pycoll::testing
