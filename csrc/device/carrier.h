// Channels to ranks whose devices this one does not reach: a thread moves segments between memory
// of the host, which kernels write and read as if it were a peer's arena, and wires to the hosts of
// those ranks.
//
//   kernel    writes slot and header of an outgoing end
//   carrier   sends both, gives the slot back     --->   writes slot and header of an incoming end
//   kernel                                               reads, gives the slot back
//   carrier   may send another one                <---   tells how many were given back
//
// Nothing is sent for which the far end has no room, so that no channel stands in another one's way
// on their common wire. Up to 2 * kDepth segments of a channel are under way: while one is
// reduced, others are copied, on the wire and copied again. Counts are those of ports, which only
// grow, and nobody tells the carrier of launches: it carries what graphs replay like all else.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/arena.h"
#include "transport/transport.h"

namespace pycoll::device {

// Threads: any method from any thread at any time, but the destructor.
class Carrier {
 public:
  struct Options {
    Shape shape;
    std::vector<std::uint32_t> peers;  // whose channels it carries
    // For each of them carried_bytes(), zeroed, where the host finds it. Outlives the carrier.
    std::vector<std::byte*> memory;
    // Nobody else uses them. A peer is reached by the first that has a link to it.
    std::vector<std::shared_ptr<transport::Transport>> wires;
    std::vector<std::string> names;  // "host:pid", by rank
    std::shared_ptr<Clock> clock;
  };

  // kInvalidArgument names a peer that no wire reaches. Carries nothing before start().
  static Status create(Options options, std::unique_ptr<Carrier>* carrier);
  ~Carrier();
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  // kTransport if there can be no thread.
  Status start();
  // kPeerLost, naming the rank, if the way to a peer broke that had not left; otherwise ok.
  Status lost(const std::string& operation) const;
  // What kernels have written is sent, if that takes no longer than `patience`; peers then see an
  // orderly end. Idempotent.
  void close(Nanoseconds patience);

 private:
  // The host's side of a channel's end.
  struct Outgoing {
    End end{};
    std::uint64_t step = 0;   // segments sent
    std::uint64_t freed = 0;  // of which the far end has given back so many
  };
  struct Incoming {
    End end{};
    std::uint64_t step = 0;  // segments that have come
    std::uint64_t told = 0;  // the far end knows that so many were given back
  };
  struct Line {
    std::uint32_t peer = 0;
    transport::Link* link = nullptr;
    std::vector<Outgoing> out;  // by number and share
    std::vector<Incoming> in;
    bool broken = false;
  };

  explicit Carrier(Options options);
  Status open();
  void run();
  bool is_over(bool moved) const;
  bool pass();
  bool send(Line& line);
  bool send_one(Line& line, std::uint32_t channel);
  bool receive(Line& line);
  bool place(Line& line, const transport::Segment& segment) const;
  static bool give_back(Line& line);
  bool hear_of_room(Line& line);
  void break_off(Line& line, const std::string& why);
  std::byte* slot_of(const End& end, std::uint64_t step) const;

  Options options_;
  std::uint32_t stride_;
  std::vector<Line> lines_;  // the thread's alone
  bool waiting_ = false;     // a segment waits for room, as of the last pass
  std::atomic<bool> leaving_{false};
  std::atomic<Nanoseconds> leaves_by_{0};
  mutable std::mutex telling_;  // guards what follows
  int lost_ = -1;
  std::string why_;
  std::mutex closing_;  // who closes second waits until all is closed
  std::thread thread_;
};

}  // namespace pycoll::device
