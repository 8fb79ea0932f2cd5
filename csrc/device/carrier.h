// Channels to ranks whose devices this one does not reach: a thread moves segments between memory
// of the host, which kernels write and read as if it were a peer's arena, and wires to the hosts of
// those ranks.
//
//   kernel    writes slot and header of an outgoing end
//   carrier   sends both, gives the slot back     --->   writes slot and header of an incoming end
//   kernel                                               reads, gives the slot back
//   carrier   may send another one                <---   tells how many were given back
//
// Where a wire's cards read and write device memory, slots lie there, and only headers and counts
// pass through the host's hands: outgoing slots are given back when the card has read them, and
// headers of incoming ones are written when kernels see what the card wrote. Each end of each
// direction lies on the device or not, as its rank can; see carried.h.
//
// Nothing is sent for which the far end has no room, so that no channel stands in another one's way
// on their common wire. Up to 2 * kDepth segments of a channel are under way: while one is
// reduced, others are copied, on the wire and copied again. Counts are those of ports, which only
// grow, and nobody tells the carrier of launches: it carries what graphs replay like all else.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
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

// The first of these that leads to the peer, or nullptr.
[[nodiscard]] transport::Transport* wire_to(
    const std::vector<std::shared_ptr<transport::Transport>>& wires, int peer);

// Threads: any method from any thread at any time, but the destructor.
class Carrier {
 public:
  // The channels to one peer, both directions.
  struct Way {
    std::uint32_t peer = 0;
    // Where the host finds it; outlives the carrier. Slots on the device are in the region that the
    // wire to the peer has entered, and the host never touches them.
    CarriedMemory memory;
    bool sends_direct = false;  // outgoing slots are on the device
    bool lands_direct = false;  // incoming ones are, and granted to the peer
    bool places = false;        // the peer has granted its incoming ones, accepted by the wire
  };
  struct Options {
    Shape shape;
    std::vector<Way> ways;
    // Makes what cards have told of visible to kernels; empty where it is by itself.
    std::function<Status()> flush;
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
    std::uint64_t read = 0;   // of which nobody reads so many any more on this side
    std::uint64_t freed = 0;  // of which the far end has given back so many
  };
  struct Incoming {
    End end{};
    std::uint64_t step = 0;  // segments that have come
    std::uint64_t told = 0;  // the far end knows that so many were given back
  };
  struct Line {
    Way way;
    transport::Link* link = nullptr;
    std::vector<Outgoing> out;  // by number and share
    std::vector<Incoming> in;
    bool broken = false;
  };
  // A header that waits until kernels see its payload.
  struct Landed {
    Line* line;
    End end;
    std::uint64_t step;
    std::uint64_t data;
  };

  explicit Carrier(Options options);
  Status open();
  void run();
  bool is_over(bool moved) const;  // for one that leaves, by a pass that began since
  bool pass();
  [[nodiscard]] bool send(Line& line);
  [[nodiscard]] bool send_one(Line& line, std::uint32_t channel);
  [[nodiscard]] bool dispatch(Line& line, const Outgoing& out,
                              const transport::SegmentHeader& header);
  [[nodiscard]] bool free_read(Line& line);
  bool receive(Line& line);
  [[nodiscard]] bool place(Line& line, const transport::Segment& segment);
  void show_landed();
  [[nodiscard]] static bool give_back(Line& line);
  bool hear_of_room(Line& line);
  void break_off(Line& line, const std::string& why);
  std::byte* slot_of(const End& end, std::uint64_t step) const;

  Options options_;
  std::uint32_t stride_;
  std::vector<Line> lines_;  // the thread's alone, as what follows
  std::vector<Landed> landed_;
  bool waiting_ = false;  // a segment waits for room, as of the last pass
  std::atomic<bool> leaving_{false};
  std::atomic<Nanoseconds> leaves_by_{0};
  mutable std::mutex telling_;  // guards what follows
  int lost_ = -1;
  std::string why_;
  std::mutex closing_;  // who closes second waits until all is closed
  std::thread thread_;
};

}  // namespace pycoll::device
