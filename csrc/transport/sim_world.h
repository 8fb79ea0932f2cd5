// The inside of the simulated network: pipes, wires and the queue of events. Only sim*.cpp include
// it.
//
//   pipe   one channel in one direction: its slots and how far sender, medium and receiver are
//   wire   one direction of a link: up to kChannelsMax pipes, notices, and what its reader knows
//   event  something that will happen at a virtual time; ties happen in the order they were planned
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/prng.h"
#include "transport/sim.h"
#include "transport/transport.h"

namespace pycoll::transport {

class SimClock final : public Clock {
 public:
  Nanoseconds now() override { return now_.load(std::memory_order_relaxed); }
  void set(Nanoseconds now) { now_.store(now, std::memory_order_relaxed); }

 private:
  std::atomic<Nanoseconds> now_{0};
};

// Memory in lines of 64 bytes that grows on demand; its contents do not survive growing.
class SimMemory {
 public:
  std::byte* at_least(std::size_t bytes);
  // Overwrites, so that who still reads what is no longer theirs gets garbage.
  void spoil(std::size_t bytes);

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
  std::size_t count_ = 0;
};

struct SimSlot {
  // Takes more of the memory that was handed over, if it was.
  void copy_until(std::size_t until);

  SegmentHeader header;
  const std::byte* handed_over = nullptr;  // where the bytes still come from
  std::size_t copied = 0;
  SimMemory data;
};

// Numbers of segments since the beginning, never reset: sent >= arrived >= shown >= released >=
// returned >= room_shown.
struct SimPipe {
  std::uint64_t sent = 0;
  std::uint64_t arrived = 0;
  std::uint64_t shown = 0;  // what the receiver can see of `arrived`
  std::uint64_t released = 0;
  std::uint64_t returned = 0;
  std::uint64_t room_shown = 0;  // what the sender can see of `returned`
  std::uint64_t reading = 0;     // segments whose memory was handed over and is not copied yet
  Nanoseconds last_arrival = 0;
  bool reserved = false;
  std::size_t reserved_bytes = 0;
  SimMemory room;
  std::array<SimSlot, kChannelDepth> slots;
};

struct SimWire {
  // When something arrives that must not overtake what was sent before; later calls come behind it.
  Nanoseconds behind_others(Nanoseconds at) { return ordered_until = std::max(at, ordered_until); }

  int from = 0;
  int to = 0;
  bool broken = false;  // nothing arrives any more
  Nanoseconds delay_min = 0;
  Nanoseconds delay_max = 0;
  Nanoseconds kib_time = 0;
  Nanoseconds ordered_until = 0;  // nothing that keeps order arrives earlier
  Nanoseconds busy_until = 0;     // when all that the writer sent has arrived
  std::array<std::unique_ptr<SimPipe>, kChannelsMax> pipes;

  Notice posted;  // by the writer, newest
  std::uint64_t posted_number = 0;
  std::map<std::uint64_t, Notice> notices;  // under way, by number
  Notice arrived;
  std::uint64_t arrived_number = 0;
  Notice shown;

  LinkState state = LinkState::kOpen;  // of the writer, as the medium would tell the reader
  LinkState state_shown = LinkState::kOpen;
  std::string reason;
};

class SimWorld {
 public:
  explicit SimWorld(SimOptions options);

  // --- for the driver; see SimNetwork
  bool advance();
  void advance_to(Nanoseconds time);
  Nanoseconds next_event_time() const;
  void kill(int rank, Nanoseconds detection_max);
  void cut(int first, int second);
  bool dead(int rank) const { return dead_[static_cast<std::size_t>(rank)]; }
  std::uint64_t trace() const { return trace_; }
  std::uint64_t event_count() const { return event_count_; }
  const SimOptions& options() const { return options_; }
  const std::shared_ptr<SimClock>& clock() const { return clock_; }

  // --- for the ends; the caller has checked that its rank lives
  SimWire& wire(int from, int to);
  static SimPipe& pipe(SimWire& wire, std::uint32_t number);
  static bool has_room(const SimPipe& pipe) { return pipe.sent - pipe.room_shown < kChannelDepth; }
  // Sends the reserved room (`handed_over` == nullptr) or the caller's memory.
  void send(SimWire& wire, std::uint32_t number, const SegmentHeader& header,
            const std::byte* handed_over);
  void release(SimWire& wire, std::uint32_t number);
  void post(SimWire& wire, const Notice& notice);
  bool poll(int rank);
  bool quiet(int rank) const { return !news_[static_cast<std::size_t>(rank)]; }
  // Reads right now what `rank` handed over and is still under way.
  void let_go(int rank);
  void close(int rank);

 private:
  enum class Kind : std::uint8_t {
    kPiece = 0,
    kSegment = 1,  // the last piece
    kRoom = 2,
    kNotice = 3,
    kClose = 4,
    kCut = 5,
    kDeath = 6,
    kDetection = 7,
  };
  struct Event {
    Nanoseconds at = 0;
    std::uint64_t order = 0;
    Kind kind = Kind::kPiece;
    int from = 0;
    int to = 0;
    std::uint32_t number = 0;
    std::uint64_t value = 0;  // segment, count of released segments, notice number, detection_max
    std::uint64_t until = 0;  // bytes copied after a piece
  };
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return a.at != b.at ? a.at > b.at : a.order > b.order;
    }
  };

  Nanoseconds now() const { return clock_->now(); }
  void plan(Event event);
  Nanoseconds draw_delay(const SimWire& wire, bool jitter);
  void record(const Event& event);
  void happen(const Event& event);
  void piece_arrives(SimWire& wire, const Event& event);
  void room_returns(SimWire& wire, const Event& event);
  void notice_arrives(SimWire& wire, std::uint64_t number);
  void break_link(int a, int b);
  void lose(SimWire& wire, const std::string& reason);
  void die(int rank, Nanoseconds detection_max);
  void cut_now(int first, int second);
  void tell(int rank) { news_[static_cast<std::size_t>(rank)] = true; }

  SimOptions options_;
  Prng prng_;
  std::shared_ptr<SimClock> clock_ = std::make_shared<SimClock>();
  std::vector<SimWire> wires_;  // from * size + to
  std::vector<bool> dead_;
  std::vector<bool> closed_;
  std::vector<bool> news_;  // since the rank's last poll
  std::priority_queue<Event, std::vector<Event>, Later> events_;
  std::uint64_t planned_ = 0;
  std::uint64_t event_count_ = 0;
  std::uint64_t trace_ = kHashSeed;
};

}  // namespace pycoll::transport
