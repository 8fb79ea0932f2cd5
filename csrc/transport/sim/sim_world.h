// The state of the simulated network: pipes, wires and the queue of events. Only
// sim*.cpp include this file.
//
//   pipe   one channel in one direction: its slots and the progress of sender, medium and receiver
//   wire   one direction of a link: up to kChannelsMax pipes, notices, and the reader's view
//   event  a change at a virtual time; events of equal time happen in the order of their planning
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
#include "transport/sim/sim_options.h"
#include "transport/transport.h"

namespace pycoll::transport {

class SimClock final : public Clock {
 public:
  Nanoseconds now() override { return now_.load(std::memory_order_relaxed); }
  void set(Nanoseconds now) { now_.store(now, std::memory_order_relaxed); }

 private:
  std::atomic<Nanoseconds> now_{0};
};

// Memory in lines of 64 bytes that grows on demand. Growing discards the content.
class SimMemory {
 public:
  std::byte* at_least(std::size_t bytes);
  // Overwrites the memory, so that code that still reads a released buffer reads garbage.
  void spoil(std::size_t bytes);

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
  std::size_t count_ = 0;
};

struct SimSlot {
  // Copies handed-over memory up to byte `until`. No effect on a segment that was not handed over.
  void copy_until(std::size_t until);

  SegmentHeader header;
  const std::byte* handed_over = nullptr;  // the caller's memory, until it is copied
  std::size_t copied = 0;
  SimMemory data;
};

// Counts of segments since the beginning, never reset:
//   sent >= arrived >= shown >= released >= returned >= space_shown
struct SimPipe {
  std::uint64_t sent = 0;
  std::uint64_t arrived = 0;
  std::uint64_t shown = 0;  // the part of `arrived` that the receiver can see
  std::uint64_t released = 0;
  std::uint64_t returned = 0;
  std::uint64_t space_shown = 0;  // the part of `returned` that the sender can see
  std::uint64_t reading = 0;      // handed-over segments that are not yet copied
  Nanoseconds last_arrival = 0;
  bool reserved = false;
  std::size_t reserved_bytes = 0;
  SimMemory slot_buffer;
  std::array<SimSlot, kChannelDepth> slots;
};

struct SimWire {
  // Returns the arrival time of something that must not overtake earlier traffic; later calls
  // return later times.
  Nanoseconds behind_others(Nanoseconds at) { return ordered_until = std::max(at, ordered_until); }

  int from = 0;
  int to = 0;
  bool broken = false;  // nothing arrives any more
  Nanoseconds delay_min = 0;
  Nanoseconds delay_max = 0;
  Nanoseconds kib_time = 0;
  Nanoseconds ordered_until = 0;  // the earliest arrival of traffic that keeps its order
  Nanoseconds busy_until = 0;     // the arrival time of everything sent so far
  std::array<std::unique_ptr<SimPipe>, kChannelsMax> pipes;

  Notice posted;  // the writer's newest notice
  std::uint64_t posted_number = 0;
  std::map<std::uint64_t, Notice> notices;  // in flight, by number
  Notice arrived;
  std::uint64_t arrived_number = 0;
  Notice shown;

  LinkState state = LinkState::kOpen;  // of the writer, as a real medium would report it
  LinkState state_shown = LinkState::kOpen;
  std::string reason;
};

class SimWorld {
 public:
  explicit SimWorld(SimOptions options);

  // The functions below are for the driver; see SimNetwork.
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

  // The functions below are for the ends. Requires: the calling rank lives.
  SimWire& wire(int from, int to);
  static SimPipe& pipe(SimWire& wire, std::uint32_t number);
  static bool has_space(const SimPipe& pipe) {
    return pipe.sent - pipe.space_shown < kChannelDepth;
  }
  // Sends the reserved slot buffer (`handed_over` == nullptr) or the caller's memory.
  void send(SimWire& wire, std::uint32_t number, const SegmentHeader& header,
            const std::byte* handed_over);
  void release(SimWire& wire, std::uint32_t number);
  void post(SimWire& wire, const Notice& notice);
  bool poll(int rank);
  bool quiet(int rank) const { return !news_[static_cast<std::size_t>(rank)]; }
  // Copies memory of `rank` that was handed over and is still in flight.
  void let_go(int rank);
  void close(int rank);

 private:
  enum class Kind : std::uint8_t {
    kPiece = 0,
    kSegment = 1,  // the last piece of a segment
    kSlotBuffer = 2,
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
    std::uint64_t until = 0;  // bytes of the segment that have arrived with this piece
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
  void slot_buffer_returns(SimWire& wire, const Event& event);
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
