// Device code: the device executor. One block runs one lane of a plan on one share of every chunk:
//
//   for tile: for row: wait for free slots, segments -> combine -> target, slots -> publish,
//   release
//
// It runs the same rows in the same order as executor/execution.cpp, and also folds operands from
// the left. So both executors give the same bits. A row has two block barriers, before and after
// its bytes. A joined lane has two barriers per tile in all:
//
//   for tile: wait for all slots, publish -> for row: combine -> target, slots -> release all
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "device/kernels/arrays.h"
#include "device/kernels/direct_write_windows.h"
#include "device/kernels/memory.h"
#include "device/kernels/program.h"
#include "device/kernels/protocols.h"
#include "plan/plan.h"

namespace pycoll::device {

// The block's shared memory.
struct Shared {
  // kPortsOfRow slots per row: the received ones, then the ones to fill. A joined lane keeps the
  // slots of every row at the row's number; other lanes keep the current row's at the beginning.
  Slot slots[kJoinedRowsMax * kPortsOfRow];
};

// `Arrays` is the layout of the caller's elements: OneArray or ManyArrays.
template <typename Protocol, typename Reduction, typename Arrays = OneArray>
class Executor {
  using Call = typename Arrays::Call;
  using Local = typename Arrays::Local;

 public:
  // Requires: threads() is a multiple of kWarp; block() < program.lane_count * program.shares.
  PYCOLL_DEVICE Executor(const Program& program, const Call& call, Reduction reduction,
                         Shared& shared)
      : program_(program),
        call_(call),
        arrays_(call),
        reduction_(reduction),
        protocol_(program),
        shared_(shared),
        wait_(program),
        share_(block() / program.lane_count) {}

  // Returns when the lane has run, or when Control::stop ends its waits.
  PYCOLL_DEVICE void run() {
    const std::uint32_t beat = begin();
    run_lane();
    if (thread() == 0) store_relaxed(&program_.beats[block()], beat + 1);
  }

 private:
  static constexpr int kInFlight = Reduction::kInFlight;
  // Slots hold bytes unchanged, so that a segment may lie in the output instead; see WriteWindow.
  static constexpr bool kWritesDirect = Protocol::kDataBehindHeader && Arrays::kWritesDirect;

  // Publishes to the host that the block has begun, and returns its beat.
  PYCOLL_DEVICE std::uint32_t begin() {
    if (thread() != 0) return 0;
    std::uint32_t* runs = &program_.runs[block()];
    const std::uint32_t beat = load(runs) + 1;
    store(runs, beat + 1);
    if (block() == 0) store_relaxed(&program_.control->label, program_.label);
    store_relaxed(&program_.beats[block()], beat);
    return beat;
  }

  // Both kinds of lanes share one call of move(): it is most of the code.
  PYCOLL_DEVICE void run_lane() {
    const bool joined = !Protocol::kDataBehindHeader && program_.chains != nullptr;
    const LaneRange lane = program_.lanes[block() % program_.lane_count];
    if (joined && thread() < program_.channel_count) chain_ = program_.chains[thread()];
    if constexpr (kWritesDirect)
      begin_direct_write(program_, call_, block() % program_.lane_count, share_);
    for (std::uint64_t tile = 0; tile < program_.tiles; ++tile) {
      bool went_well = !joined || open_channel(tile);
      if (joined && sync_any(!went_well)) return;
      for (std::uint32_t index = lane.begin; index < lane.end; ++index) {
        if (!find_segment(index, tile)) continue;
        slots_ = shared_.slots + (joined ? index * kPortsOfRow : 0);
        if (!joined && sync_any(!open_slots())) return;
        if (kWritesDirect && may_write_direct_after_receive(program_, *row_)) {
          if (sends()) choose_destination();
          (void)sync_any(false);
        }
        // Threads vote per warp before they stop: the threads that read a line must stay together.
        const bool stops =
            warp_any(!went_well || !(joined ? await_header_in(index) : await_late_headers()));
        written_direct_ = is_written_direct();
        went_well = !stops && ((written_direct_ && row_->send_count == 0) || move());
        if (joined && stops) break;
        if (joined) continue;
        // After this barrier all bytes are read and written: slots may be released and headers
        // published.
        if (sync_any(!went_well)) return;
        close_slots();
      }
      if (!joined) continue;
      if (sync_any(!went_well)) return;
      close_channel();
    }
  }

  // Finds the row's bytes in this tile; false if the row has nothing to do.
  PYCOLL_DEVICE bool find_segment(std::uint32_t index, std::uint64_t tile) {
    row_ = &program_.rows[index];
    offsets_ = &program_.share_offsets[index * program_.shares + share_];
    skip_ = 0;
    bytes_ = 0;
    if (row_->chunk == plan::kToken) return tile + 1 == program_.tiles;
    if (offsets_->length == kAbsent) return false;
    const std::uint64_t offset = tile * program_.segment_length;
    // The segment is empty and travels as a header alone.
    if (offset >= offsets_->length) return tile == 0;
    const std::uint64_t left = offsets_->length - offset;
    const std::uint64_t length = left < program_.segment_length ? left : program_.segment_length;
    skip_ = offset * program_.item_bytes;
    bytes_ = static_cast<std::uint32_t>(length) * program_.item_bytes;
    return true;
  }

  // --- channels: thread i serves the row's i-th receive channel, thread kRecvMax + i its i-th send
  // channel

  PYCOLL_DEVICE bool receives() const { return thread() < row_->recv_count; }
  PYCOLL_DEVICE bool sends() const {
    return thread() - plan::kRecvMax < row_->send_count;  // wraps below kRecvMax
  }

  // Whether segments order all memory, or only their own bytes.
  PYCOLL_DEVICE bool fences() const { return Protocol::kDataBehindHeader || program_.ordered; }

  PYCOLL_DEVICE bool open_slots() {
    if (!receives() && !sends()) return true;
    const std::uint32_t channel =
        receives() ? row_->recv[thread()] : row_->send[thread() - plan::kRecvMax];
    Port* port = program_.ports[channel * program_.shares + share_];
    // A stopped communicator stays stopped, so the step may advance before the wait succeeds.
    const std::uint64_t step = load(&port->step);
    store(&port->step, step + 1);
    const Slot slot = slot_at(port, step);
    shared_.slots[thread()] = slot;
    if (receives()) return !Protocol::kDataBehindHeader || await_header(slot);
    if (!await_space(slot)) return false;
    if (row_->recv_count == 0) choose_destination();
    return true;
  }

  PYCOLL_DEVICE Slot slot_at(Port* port, std::uint64_t step) const {
    return {port->slots + step % kDepth * program_.slot_stride, step, port};
  }

  // Paired with the receiver's release in close_slots(): its reads come before these writes.
  PYCOLL_DEVICE bool await_space(const Slot& slot) {
    const std::uint64_t* credit = slot.port->credit;
    while (load_acquire(credit) + kDepth <= slot.step) {
      if (wait_.is_over(credit, *slot.port)) return false;
    }
    return true;
  }

  // The header that both ends of a segment must agree on, without kWrittenDirect.
  PYCOLL_DEVICE std::uint64_t expectation() const {
    return (offsets_->agreement & ~(kLengthMask | kWrittenDirect)) | bytes_;
  }

  // Paired with close_slots() of the sender. The header is a line of Ll: both halves carry flags.
  PYCOLL_DEVICE bool await_header(const Slot& slot) {
    const Pack* header = slot.port->headers + slot.step % kDepth;
    Pack line = load16_relaxed(header);
    while (!Ll::has(line, Ll::flag(slot.step))) {
      if (wait_.is_over(header, *slot.port)) return false;
      line = load16_relaxed(header);
    }
    if (fences()) fence();
    const std::uint64_t word = Ll::data_of(line);
    const bool is_direct = kWritesDirect && word == (expectation() | kWrittenDirect);
    if (is_direct) shared_.slots[thread()].data = Arrays::address(target());
    if (is_direct || word == expectation()) return true;
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
    // The writes of all threads of the block came before the last block barrier, so the fence
    // covers them.
    if (fences()) fence();
    publish(slot);
  }

  PYCOLL_DEVICE void publish(const Slot& slot) const {
    store16_relaxed(slot.port->headers + slot.step % kDepth,
                    Ll::line(expectation() | direct_flag(slot), Ll::flag(slot.step)));
  }

  // --- direct writes, direct_write_windows.h: a segment may lie in the receiver's output

  PYCOLL_DEVICE void choose_destination() {
    Slot& slot = shared_.slots[thread()];
    if constexpr (kWritesDirect)
      slot.data = destination_of(program_, slot, *row_, *offsets_, skip_, bytes_);
  }

  PYCOLL_DEVICE std::uint64_t direct_flag(const Slot& slot) const {
    if constexpr (!kWritesDirect) return 0;
    return slot.data == slot_at(slot.port, slot.step).data ? 0 : kWrittenDirect;
  }

  // Whether the row's segment lies in the output already. Requires: the block barrier has passed.
  PYCOLL_DEVICE bool is_written_direct() const {
    return kWritesDirect && (row_->flags & plan::kFlagDirectWrite) != 0 &&
           slots_[0].data == Arrays::address(target());
  }

  // --- joined lanes: thread i serves channel i, with all its uses in a tile

  // Waits for free slots for all segments that the channel sends in this tile, and publishes their
  // headers. Headers may precede their data, since data carry flags of their own; a header only
  // names the operation that its segment belongs to.
  PYCOLL_DEVICE bool open_channel(std::uint64_t tile) {
    if (thread() >= program_.channel_count) return true;
    port_ = program_.ports[thread() * program_.shares + share_];
    first_step_ = load(&port_->step);
    std::uint64_t step = first_step_;
    bool went_well = true;
    for (const std::uint16_t use : chain_.uses) {
      if (use == kNoUse || !find_segment(use / kPortsOfRow, tile)) continue;
      const Slot slot = slot_at(port_, step++);
      shared_.slots[use] = slot;
      if (use % kPortsOfRow < plan::kRecvMax || !went_well) continue;
      went_well = await_space(slot);
      if (went_well) publish(slot);
    }
    store(&port_->step, step);
    return went_well;
  }

  PYCOLL_DEVICE bool await_header_in(std::uint32_t row) {
    for (const std::uint16_t use : chain_.uses) {
      const bool is_here = use / kPortsOfRow == row && use % kPortsOfRow < plan::kRecvMax;
      if (is_here && !await_header(shared_.slots[use])) return false;
    }
    return true;
  }

  // Releases the tile's slots. Requires: the barrier after the last read has passed.
  PYCOLL_DEVICE void close_channel() {
    if (thread() >= program_.channel_count) return;
    if (chain_.uses[0] % kPortsOfRow >= plan::kRecvMax) return;
    const std::uint64_t step = load(&port_->step);
    if (step != first_step_) store_release(port_->credit, step);
  }

  // --- bytes

  PYCOLL_DEVICE std::byte* scratch(std::uint32_t slot) const {
    const std::uint64_t number = std::uint64_t{share_} * program_.scratch_slots + slot;
    return program_.scratch + number * program_.scratch_stride;
  }

  PYCOLL_DEVICE Local source() const {
    switch (static_cast<plan::Buffer>(row_->source)) {
      case plan::Buffer::kInput:
        return arrays_.input(offsets_->source + skip_);
      case plan::Buffer::kOutput:
        return arrays_.output(offsets_->source + skip_);
      case plan::Buffer::kScratch:
        return Arrays::own(scratch(row_->source_slot));
      case plan::Buffer::kNone:
        break;
    }
    return Arrays::none();
  }

  PYCOLL_DEVICE Local target() const {
    if (static_cast<plan::Buffer>(row_->target) == plan::Buffer::kOutput) {
      return arrays_.output(offsets_->target + skip_);
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

  // Moves all of the row's bytes; false if a wait was given up.
  PYCOLL_DEVICE bool move() {
    const std::uint32_t units = protocol_.units(bytes_);
    for (std::uint32_t first = thread(); first < units; first += threads() * kInFlight) {
      if (!move_units(first, units)) return false;
    }
    for (int i = 0; i < row_->send_count; ++i) {
      protocol_.finish(slots_[plan::kRecvMax + i], bytes_, program_.slot_stride);
    }
    for (int i = 0; i < row_->recv_count; ++i) protocol_.empty(slots_[i], bytes_);
    return true;
  }

  // Moves units first, first + threads(), ..., kInFlight of them.
  PYCOLL_DEVICE bool move_units(std::uint32_t first, std::uint32_t units) {
    const int carries = row_->carry != 0 ? 1 : 0;
    const int locals = static_cast<plan::Buffer>(row_->source) != plan::Buffer::kNone ? 1 : 0;
    const int operands = carries + locals + row_->recv_count;
    Pack value[kInFlight] = {};
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

  // Takes one operand, from local memory or from the row's slot of that number; copies it to
  // `value` or combines it with that.
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
      } else if (!protocol_.receive(slots_[slot], unit, bytes_, &next[i], wait_)) {
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
    const Local to = kWritesDirect && written_direct_ ? Arrays::none() : target();
    PYCOLL_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const std::uint32_t unit = first + static_cast<std::uint32_t>(i) * threads();
      if (unit >= units) continue;
      if (Arrays::exists(to)) {
        arrays_.store_at(to, protocol_.offset(unit), value[i], valid_bytes(unit));
      }
      for (int peer = 0; peer < row_->send_count; ++peer) {
        protocol_.send(slots_[plan::kRecvMax + peer], unit, bytes_, value[i]);
      }
    }
  }

  const Program& program_;
  const Call& call_;
  Arrays arrays_;
  Reduction reduction_;
  Protocol protocol_;
  Shared& shared_;
  Wait wait_;
  std::uint32_t share_;
  Slot* slots_ = nullptr;  // of the current row
  const plan::Row* row_ = nullptr;
  const ShareOffsets* offsets_ = nullptr;
  std::uint64_t skip_ = 0;       // bytes from the share's first element of the chunk to the segment
  std::uint32_t bytes_ = 0;      // of the segment
  bool written_direct_ = false;  // the sender wrote the segment to the output directly
  // This thread's channel of a joined lane, and the channel's step when the tile began.
  Chain chain_{{kNoUse, kNoUse}};
  Port* port_ = nullptr;
  std::uint64_t first_step_ = 0;
};

}  // namespace pycoll::device
