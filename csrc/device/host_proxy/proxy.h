// The host proxy: channels between ranks whose devices do not reach each other. A thread moves
// segments between host memory and wires to the hosts of those ranks. Kernels access the host
// memory as if it were a peer's channel memory.
//
//   kernel       writes slot and header of an outgoing end
//   host proxy   sends both, releases the slot     --->   writes slot and header of an incoming end
//   kernel                                                reads, releases the slot
//   host proxy   may send another segment          <---   sends the number of released slots
//
// Where a wire's cards read and write device memory, slots lie in device memory, and only headers
// and counts pass through the host. Outgoing slots are released when the card has read them.
// Headers of incoming slots are written when kernels see the bytes that the card wrote. Each end of
// each direction lies on the device or not, as its rank allows; see channels/proxied.h.
//
// The proxy sends a segment only if the far end has a free slot, so no channel blocks another one
// on their common wire. Up to 2 * kDepth segments of a channel are under way: one is reduced while
// others are copied, on the wire and copied again. Counts are those of ports and only grow. The
// proxy follows the counts and is not told of launches, so it serves replayed graphs as well.
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
#include "device/memory/channel_memory.h"
#include "transport/capabilities.h"

namespace pycoll::device {

// The first of the wires that leads to the peer, or nullptr.
[[nodiscard]] transport::Transport* wire_to(
    const std::vector<std::shared_ptr<transport::Transport>>& wires, int peer);

// Threads: any method from any thread at any time, except the destructor.
class HostProxy {
 public:
  // The channels to one peer, both directions.
  struct Way {
    std::uint32_t peer = 0;
    // The host's addresses; outlives the proxy. Slots on the device lie in the region that was
    // entered in the wire to the peer; the host never accesses them.
    ProxiedMemory memory;
    bool sends_direct = false;     // outgoing slots are on the device
    bool receives_direct = false;  // incoming slots are on the device, and granted to the peer
    bool peer_granted = false;     // the wire has accepted the peer's grant of its incoming slots
  };
  struct Options {
    Shape shape;
    std::vector<Way> ways;
    // Makes bytes that cards have reported visible to kernels; empty where nothing has to be done.
    std::function<Status()> flush;
    // The wires, which only this proxy uses. A peer is reached by the first wire with a link to it.
    std::vector<std::shared_ptr<transport::Transport>> wires;
    std::vector<std::string> names;  // "host:pid", by rank
    std::shared_ptr<Clock> clock;
  };

  // kInvalidArgument names a peer that no wire reaches. The proxy moves nothing before start().
  static Status create(Options options, std::unique_ptr<HostProxy>* host_proxy);
  ~HostProxy();
  HostProxy(const HostProxy&) = delete;
  HostProxy& operator=(const HostProxy&) = delete;

  // kTransport if no thread can be started.
  Status start();
  // kPeerLost, naming the rank, if the wire broke to a peer that had not left; otherwise ok.
  Status describe_loss(const std::string& operation) const;
  // Sends what kernels have written, within `patience`; peers then see an orderly end. Idempotent.
  void close(Nanoseconds patience);

 private:
  // The host's side of a channel's end.
  struct Outgoing {
    End end{};
    std::uint64_t step = 0;   // segments sent
    std::uint64_t read = 0;   // of those, segments that no thread or card reads now
    std::uint64_t freed = 0;  // of those, segments that the far end has released
  };
  struct Incoming {
    End end{};
    std::uint64_t step = 0;      // segments received
    std::uint64_t reported = 0;  // released segments that the far end knows of
  };
  // The sending end of a channel of the link.
  struct Wire {
    transport::SendChannel* channel = nullptr;
    transport::SendCapabilities can;
  };
  struct Line {
    Way way;
    transport::Link* link = nullptr;
    std::vector<Wire> wires;    // by number
    std::vector<Outgoing> out;  // by number and share
    std::vector<Incoming> in;
    bool broken = false;
  };
  // A header that is written once kernels see its payload.
  struct PendingHeader {
    Line* line;
    End end;
    std::uint64_t step;
    std::uint64_t data;
  };

  explicit HostProxy(Options options);
  Status open();
  void run();
  bool is_over(bool moved) const;  // of a leaving proxy, by a pass that began after close()
  bool pass();
  [[nodiscard]] bool send(Line& line);
  [[nodiscard]] bool send_one(Line& line, std::uint32_t channel);
  [[nodiscard]] bool dispatch(Line& line, const Outgoing& out,
                              const transport::SegmentHeader& header);
  [[nodiscard]] bool free_read(Line& line);
  bool receive(Line& line);
  [[nodiscard]] bool take_segment(Line& line, const transport::Segment& segment);
  void publish_headers();
  [[nodiscard]] static bool give_back(Line& line);
  bool hear_of_space(Line& line);
  void break_off(Line& line, const std::string& why);
  std::byte* slot_of(const End& end, std::uint64_t step) const;

  Options options_;
  std::uint32_t stride_;
  std::vector<Line> lines_;  // the thread's alone, like the next two members
  std::vector<PendingHeader> pending_headers_;
  bool waiting_ = false;  // as of the last pass, a segment waits for a free slot
  std::atomic<bool> leaving_{false};
  std::atomic<Nanoseconds> leaves_by_{0};
  mutable std::mutex telling_;  // guards the members below
  int lost_ = -1;
  std::string why_;
  std::mutex closing_;  // a second close() waits until the first one has ended
  std::thread thread_;
};

}  // namespace pycoll::device
