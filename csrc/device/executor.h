// Device code: the device executor. One block runs one lane of a plan on one share of every chunk:
//
//   for tile: for row: wait for rooms (and segments) -> combine -> target, slots -> publish,
//   release
//
// It is runtime/execution.cpp with threads: the same rows in the same order, the same fold from the
// left, so the same bits. A row has two meetings of the block, one before its bytes and one after.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "device/arrays.h"
#include "device/memory.h"
#include "device/program.h"
#include "device/protocols.h"
#include "plan/plan.h"

namespace pycoll::device {

// The block's own fast memory.
struct Shared {
  Slot slots[plan::kRecvMax + plan::kSendMax];  // of the current row: received ones, then rooms
};

// `Arrays` is where the caller's elements lie: OneArray or ManyArrays.
template <typename Protocol, typename Reduction, typename Arrays = OneArray>
class Executor {
  using Call = typename Arrays::Call;
  using Local = typename Arrays::Local;

 public:
  // Requires: threads() is a multiple of kWarp; block() < program.lane_count * program.shares.
  PYCOLL_DEVICE Executor(const Program& program, const Call& call, Reduction reduction,
                         Shared& shared)
      : program_(program),
        arrays_(call),
        reduction_(reduction),
        protocol_(program.item_bytes),
        shared_(shared),
        wait_(program),
        share_(block() / program.lane_count) {}

  // Returns when the lane has run, or when everybody should stop.
  PYCOLL_DEVICE void run() {
    const std::uint32_t beat = begin();
    run_lane();
    if (thread() == 0) store_relaxed(&program_.beats[block()], beat + 1);
  }

 private:
  static constexpr int kInFlight = Reduction::kInFlight;
  static constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;

  // The block's beat, told to the host.
  PYCOLL_DEVICE std::uint32_t begin() {
    if (thread() != 0) return 0;
    std::uint32_t* runs = &program_.runs[block()];
    const std::uint32_t beat = load(runs) + 1;
    store(runs, beat + 1);
    if (block() == 0) store_relaxed(&program_.control->label, program_.label);
    store_relaxed(&program_.beats[block()], beat);
    return beat;
  }

  PYCOLL_DEVICE void run_lane() {
    const LaneRange lane = program_.lanes[block() % program_.lane_count];
    const Range longest = share_of(program_.longest);
    const std::uint64_t tiles =
        longest.length == 0 ? 1 : div_ceil(longest.length, program_.segment_length);
    for (std::uint64_t tile = 0; tile < tiles; ++tile) {
      for (std::uint32_t index = lane.begin; index < lane.end; ++index) {
        row_ = &program_.rows[index];
        place_ = &program_.places[index];
        if (find_segment(tile, tiles) && !run_row()) return;
      }
    }
  }

  PYCOLL_DEVICE Range share_of(std::uint64_t length) const {
    const std::uint64_t granule = kGranuleBytes / program_.item_bytes;
    const Range part = partition(div_ceil(length, granule), program_.shares, share_);
    const std::uint64_t begin = part.offset * granule;
    if (begin >= length) return {length, 0};
    const std::uint64_t end = begin + part.length * granule;
    return {begin, (end < length ? end : length) - begin};
  }

  // The row's bytes in this tile; false if it has nothing to do.
  PYCOLL_DEVICE bool find_segment(std::uint64_t tile, std::uint64_t tiles) {
    skip_ = 0;
    bytes_ = 0;
    if (row_->chunk == plan::kToken) return tile + 1 == tiles;
    const Range share = share_of(place_->length);
    const std::uint64_t offset = tile * program_.segment_length;
    if (offset >= share.length) return tile == 0;  // travels empty, as a header
    const std::uint64_t left = share.length - offset;
    const std::uint64_t length = left < program_.segment_length ? left : program_.segment_length;
    skip_ = (share.offset + offset) * program_.item_bytes;
    bytes_ = static_cast<std::uint32_t>(length) * program_.item_bytes;
    return true;
  }

  PYCOLL_DEVICE bool run_row() {
    bool went_well = open_slots();
    if (sync_any(!went_well)) return false;
    // Lanes of a warp stay together, since they read lines together.
    went_well = !warp_any(!await_late_headers()) && move();
    // All is read and written behind this, so slots may be given back and headers sent.
    if (sync_any(!went_well)) return false;
    close_slots();
    return true;
  }

  // --- channels; thread i looks after the row's i-th receive channel, kRecvMax + i after a send
  // one

  PYCOLL_DEVICE bool receives() const { return thread() < row_->recv_count; }
  PYCOLL_DEVICE bool sends() const {
    return thread() - plan::kRecvMax < row_->send_count;  // wraps below kRecvMax
  }

  // Whether segments carry the order of all memory with them, or just themselves.
  PYCOLL_DEVICE bool fences() const { return Protocol::kDataBehindHeader || program_.ordered; }

  PYCOLL_DEVICE bool open_slots() {
    if (!receives() && !sends()) return true;
    const std::uint32_t channel =
        receives() ? row_->recv[thread()] : row_->send[thread() - plan::kRecvMax];
    Port* port = program_.ports[channel * program_.shares + share_];
    // A communicator that stopped stays stopped, so it does not matter that this comes early.
    const std::uint64_t step = load(&port->step);
    store(&port->step, step + 1);
    const Slot slot{port->slots + step % kDepth * program_.slot_stride, step, port};
    shared_.slots[thread()] = slot;
    if (!receives()) return await_room(slot);
    return Protocol::kDataBehindHeader ? await_header(slot) : true;
  }

  // Paired with the release in close_slots() of the receiver: its reads come before our writes.
  PYCOLL_DEVICE bool await_room(const Slot& slot) {
    const std::uint64_t* credit = slot.port->credit;
    while (load_acquire(credit) + kDepth <= slot.step) {
      if (wait_.is_over(credit, *slot.port)) return false;
    }
    return true;
  }

  // What both ends of a segment must agree on.
  PYCOLL_DEVICE std::uint64_t expectation() const { return program_.agreement + bytes_ * kOdd; }

  // Paired with close_slots() of the sender. A line of Ll: its halves carry flags of their own.
  PYCOLL_DEVICE bool await_header(const Slot& slot) {
    const Pack* header = slot.port->headers + slot.step % kDepth;
    Pack line = load16_relaxed(header);
    while (!Ll::has(line, Ll::flag(slot.step))) {
      if (wait_.is_over(header, *slot.port)) return false;
      line = load16_relaxed(header);
    }
    if (fences()) fence();
    if (Ll::data_of(line) == expectation()) return true;
    store_relaxed(&program_.control->odd_peer, slot.port->peer + 1);
    store_relaxed(&program_.control->stop, kStopMismatch);
    return false;
  }

  PYCOLL_DEVICE bool await_late_headers() {
    if (Protocol::kDataBehindHeader || !receives()) return true;
    return await_header(shared_.slots[thread()]);
  }

  PYCOLL_DEVICE void close_slots() {
    if (!receives() && !sends()) return;
    const Slot slot = shared_.slots[thread()];
    if (receives()) return store_release(slot.port->credit, slot.step + 1);
    // Behind what all threads of the block wrote, by the meeting before.
    if (fences()) fence();
    store16_relaxed(slot.port->headers + slot.step % kDepth,
                    Ll::line(expectation(), Ll::flag(slot.step)));
  }

  // --- bytes

  PYCOLL_DEVICE std::byte* scratch(std::uint32_t slot) const {
    const std::uint64_t number = std::uint64_t{share_} * program_.scratch_slots + slot;
    return program_.scratch + number * program_.scratch_stride;
  }

  PYCOLL_DEVICE Local source() const {
    switch (static_cast<plan::Buffer>(row_->source)) {
      case plan::Buffer::kInput:
        return arrays_.input(place_->source + skip_);
      case plan::Buffer::kOutput:
        return arrays_.output(place_->source + skip_);
      case plan::Buffer::kScratch:
        return Arrays::own(scratch(row_->source_slot));
      case plan::Buffer::kNone:
        break;
    }
    return Arrays::none();
  }

  PYCOLL_DEVICE Local target() const {
    if (static_cast<plan::Buffer>(row_->target) == plan::Buffer::kOutput) {
      return arrays_.output(place_->target + skip_);
    }
    return static_cast<plan::Buffer>(row_->target) == plan::Buffer::kScratch
               ? Arrays::own(scratch(row_->target_slot))
               : Arrays::none();
  }

  PYCOLL_DEVICE std::uint32_t valid_bytes(std::uint32_t unit) const {
    const std::uint32_t offset = protocol_.offset(unit);
    const std::uint32_t left = offset < bytes_ ? bytes_ - offset : 0;
    return left < protocol_.width(unit) ? left : protocol_.width(unit);
  }

  // All of the row's bytes; false if a wait was given up.
  PYCOLL_DEVICE bool move() {
    const std::uint32_t units = protocol_.units(bytes_);
    for (std::uint32_t first = thread(); first < units; first += threads() * kInFlight) {
      if (!move_units(first, units)) return false;
    }
    for (int i = 0; i < row_->send_count; ++i) {
      protocol_.finish(shared_.slots[plan::kRecvMax + i], bytes_, program_.slot_stride);
    }
    return true;
  }

  // Units first, first + threads(), ... as many as a thread has in flight.
  PYCOLL_DEVICE bool move_units(std::uint32_t first, std::uint32_t units) {
    const int carries = row_->carry != 0 ? 1 : 0;
    const int locals = static_cast<plan::Buffer>(row_->source) != plan::Buffer::kNone ? 1 : 0;
    const int operands = carries + locals + row_->recv_count;
    Pack value[kInFlight];
    for (int k = 0; k < operands; ++k) {
      const int place = k - carries;
      Local local = Arrays::none();
      int slot = place;
      if (place < 0) {
        local = Arrays::own(scratch(row_->carry - 1u));
      } else if (locals != 0 && place == row_->source_position) {
        local = source();
      } else if (locals != 0 && place > row_->source_position) {
        slot = place - 1;
      }
      if (!take(first, units, local, slot, k != 0, value)) return false;
    }
    if (operands == 0) return true;
    if (program_.divisor != 0 && operands > 1 && (row_->flags & plan::kFlagFinal) != 0) {
      PYCOLL_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        value[i] = reduction_.divide(value[i], program_.divisor);
      }
    }
    give(first, units, value);
    return true;
  }

  // One operand, from local memory or the row's slot of that number, copied or combined.
  PYCOLL_DEVICE bool take(std::uint32_t first, std::uint32_t units, Local local, int slot,
                          bool combines, Pack (&value)[kInFlight]) {
    Pack next[kInFlight];
    PYCOLL_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const std::uint32_t unit = first + static_cast<std::uint32_t>(i) * threads();
      next[i] = {0, 0};
      if (unit >= units) continue;
      if (Arrays::exists(local)) {
        next[i] = arrays_.load_at(local, protocol_.offset(unit), valid_bytes(unit));
      } else if (!protocol_.receive(shared_.slots[slot], unit, bytes_, &next[i], wait_)) {
        return false;
      }
    }
    PYCOLL_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      value[i] = combines ? reduction_.combine(value[i], next[i]) : next[i];
    }
    return true;
  }

  PYCOLL_DEVICE void give(std::uint32_t first, std::uint32_t units,
                          const Pack (&value)[kInFlight]) {
    const Local to = target();
    PYCOLL_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const std::uint32_t unit = first + static_cast<std::uint32_t>(i) * threads();
      if (unit >= units) continue;
      if (Arrays::exists(to)) {
        arrays_.store_at(to, protocol_.offset(unit), value[i], valid_bytes(unit));
      }
      for (int peer = 0; peer < row_->send_count; ++peer) {
        protocol_.send(shared_.slots[plan::kRecvMax + peer], unit, bytes_, value[i]);
      }
    }
  }

  const Program& program_;
  Arrays arrays_;
  Reduction reduction_;
  Protocol protocol_;
  Shared& shared_;
  Wait wait_;
  std::uint32_t share_;
  const plan::Row* row_ = nullptr;
  const Place* place_ = nullptr;
  std::uint64_t skip_ = 0;   // bytes from element 0 of the chunk to the segment
  std::uint32_t bytes_ = 0;  // of the segment
};

}  // namespace pycoll::device
