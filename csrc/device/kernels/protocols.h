// Device code: how the bytes of a segment lie in a slot, and how a reader knows that they have
// arrived. A segment is cut in units of up to 16 bytes, one per thread at a time:
//
//   Simple   a unit takes 16 bytes; it is valid when the header is, which a fence puts behind it
//   Ll       a unit takes two lines of 16 bytes: {data 4, flag 4, data 4, flag 4}. Each half of 8
//            bytes arrives as one, so data need no header, no fence and no barrier
//   Ll128    a line of 128 bytes holds 120 bytes of data and a flag of 8; eight threads of a warp
//            write and read it together. Elements of 16 bytes must not be torn, so they fill 112
//   Pattern  a unit takes 16 bytes; it has arrived when neither of its two words is kEmpty. Units
//            that contain kEmpty as data travel as lines of Ll, in another part of the same slot
//
// The flag of step s is s + 1; Ll uses its low 32 bits. Once in 2^31 steps every slot is written as
// a whole (`cleans`), so that no old line can be mistaken for a new one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels/memory.h"
#include "device/kernels/pack.h"
#include "device/kernels/program.h"

namespace pycoll::device {

// A slot of a channel that the current row reads or fills.
struct Slot {
  std::byte* data;
  std::uint64_t step;
  Port* port;
};

// A wait that ends early when Control::stop is set.
class Wait {
 public:
  PYCOLL_DEVICE explicit Wait(const Program& program) : program_(&program) {}

  // Called each time after `polled` was read in vain, and `other` if looks_aside(). Returns true if
  // the wait must end, and records the rank that was waited for.
  PYCOLL_DEVICE bool is_over(const void* polled, const void* other, const Port& port) {
    if (++polls_ % kPollsPerLook == 0 && load_relaxed(&program_->control->stop) != 0) {
      store_relaxed(&program_->waits[port.peer], 1u);
      return true;
    }
    pause(polled, other);
    return false;
  }
  PYCOLL_DEVICE bool is_over(const void* polled, const Port& port) {
    return is_over(polled, polled, port);
  }
  // Whether this poll also looks where data seldom lie; the first polls do not.
  PYCOLL_DEVICE bool looks_aside() const {
    return polls_ % kPollsPerLookAside == kPollsPerLookAside - 1;
  }

 private:
  const Program* program_;
  std::uint32_t polls_ = 0;
};

PYCOLL_DEVICE std::uint32_t div_ceil_of(std::uint32_t value, std::uint32_t divisor) {
  return (value + divisor - 1) / divisor;
}

class Simple {
 public:
  static constexpr bool kDataBehindHeader = true;
  PYCOLL_DEVICE explicit Simple(const Program& /*program*/) {}

  // Units of a segment, the offset of a unit in it, and the most bytes that a unit has.
  PYCOLL_DEVICE static std::uint32_t units(std::uint32_t bytes) {
    return div_ceil_of(bytes, kPackBytes);
  }
  PYCOLL_DEVICE static std::uint32_t offset(std::uint32_t unit) { return unit * kPackBytes; }
  PYCOLL_DEVICE static std::uint32_t width(std::uint32_t /*unit*/) { return kPackBytes; }

  // False if the wait is over and the unit has not arrived.
  PYCOLL_DEVICE static bool receive(const Slot& slot, std::uint32_t unit, std::uint32_t /*bytes*/,
                                    Pack* pack, Wait& /*wait*/) {
    *pack = load16(slot.data + unit * kPackBytes);
    return true;
  }
  PYCOLL_DEVICE static void send(const Slot& slot, std::uint32_t unit, std::uint32_t /*bytes*/,
                                 Pack pack) {
    store16(slot.data + unit * kPackBytes, pack);
  }
  // All threads of the block call these after the last unit was sent (finish) or received (empty).
  PYCOLL_DEVICE static void finish(const Slot& /*slot*/, std::uint32_t /*bytes*/,
                                   std::uint32_t /*slot_bytes*/) {}
  PYCOLL_DEVICE static void empty(const Slot& /*slot*/, std::uint32_t /*bytes*/) {}
};

class Ll {
 public:
  static constexpr bool kDataBehindHeader = false;
  // A power of two, far below 2^32.
  static constexpr std::uint64_t kCleaningPeriod = std::uint64_t{1} << 31;
  static constexpr std::uint32_t kUnitBytes = 2 * kPackBytes;  // in the slot
  PYCOLL_DEVICE explicit Ll(const Program& /*program*/) {}

  PYCOLL_DEVICE static std::uint32_t units(std::uint32_t bytes) {
    return div_ceil_of(bytes, kPackBytes);
  }
  PYCOLL_DEVICE static std::uint32_t offset(std::uint32_t unit) { return unit * kPackBytes; }
  PYCOLL_DEVICE static std::uint32_t width(std::uint32_t /*unit*/) { return kPackBytes; }

  PYCOLL_DEVICE static std::uint64_t flag(std::uint64_t step) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(step + 1)) << 32;
  }
  PYCOLL_DEVICE static Pack line(std::uint64_t data, std::uint64_t flag) {
    return {(data & kData) | flag, data >> 32 | flag};
  }
  PYCOLL_DEVICE static std::uint64_t data_of(Pack line) {
    return (line.low & kData) | line.high << 32;
  }
  PYCOLL_DEVICE static bool has(Pack line, std::uint64_t flag) {
    return (line.low & ~kData) == flag && (line.high & ~kData) == flag;
  }

  PYCOLL_DEVICE static bool receive(const Slot& slot, std::uint32_t unit, std::uint32_t /*bytes*/,
                                    Pack* pack, Wait& wait) {
    const Pack* lines = reinterpret_cast<const Pack*>(slot.data) + 2 * unit;
    while (!look(lines, slot.step, pack)) {
      if (wait.is_over(lines, *slot.port)) return false;
    }
    return true;
  }
  // Loads the data of two lines; false if one of them is not of the step.
  PYCOLL_DEVICE static bool look(const Pack* lines, std::uint64_t step, Pack* pack) {
    const Pack first = load16_relaxed(lines);
    const Pack second = load16_relaxed(lines + 1);
    *pack = {data_of(first), data_of(second)};
    return has(first, flag(step)) && has(second, flag(step));
  }

  PYCOLL_DEVICE static void send(const Slot& slot, std::uint32_t unit, std::uint32_t /*bytes*/,
                                 Pack pack) {
    say(reinterpret_cast<Pack*>(slot.data) + 2 * unit, slot.step, pack);
  }
  PYCOLL_DEVICE static void say(Pack* lines, std::uint64_t step, Pack pack) {
    store16_relaxed(lines, line(pack.low, flag(step)));
    store16_relaxed(lines + 1, line(pack.high, flag(step)));
  }

  PYCOLL_DEVICE static bool cleans(std::uint64_t step) { return step % kCleaningPeriod < kDepth; }

  PYCOLL_DEVICE static void finish(const Slot& slot, std::uint32_t bytes,
                                   std::uint32_t slot_bytes) {
    if (!cleans(slot.step)) return;
    for (std::uint32_t unit = units(bytes) + thread(); unit < slot_bytes / kUnitBytes;
         unit += threads()) {
      send(slot, unit, bytes, {0, 0});
    }
  }
  PYCOLL_DEVICE static void empty(const Slot& /*slot*/, std::uint32_t /*bytes*/) {}

 private:
  static constexpr std::uint64_t kData = 0xffffffff;
};

class Ll128 {
 public:
  static constexpr bool kDataBehindHeader = false;
  static constexpr std::uint32_t kLineUnits = 8;
  static constexpr std::uint32_t kLineBytesMin = 7 * kPackBytes;  // of data
  PYCOLL_DEVICE explicit Ll128(const Program& program)
      : last_width_(program.item_bytes == kPackBytes ? 0 : 8) {}

  PYCOLL_DEVICE std::uint32_t line_bytes() const {
    return (kLineUnits - 1) * kPackBytes + last_width_;
  }
  // A multiple of kWarp, since a warp reads together; units behind the last line are idle.
  PYCOLL_DEVICE std::uint32_t units(std::uint32_t bytes) const {
    return div_ceil_of(used(bytes), kWarp) * kWarp;
  }
  PYCOLL_DEVICE std::uint32_t offset(std::uint32_t unit) const {
    return unit / kLineUnits * line_bytes() + unit % kLineUnits * kPackBytes;
  }
  PYCOLL_DEVICE std::uint32_t width(std::uint32_t unit) const {
    return is_last(unit) ? last_width_ : kPackBytes;
  }

  PYCOLL_DEVICE bool receive(const Slot& slot, std::uint32_t unit, std::uint32_t bytes, Pack* pack,
                             Wait& wait) const {
    const Pack* mine = reinterpret_cast<const Pack*>(slot.data) + unit;
    const bool is_used = unit < used(bytes);
    for (;;) {
      const bool late = is_used && is_last(unit) && load16_of_line(mine).high != slot.step + 1;
      if (!warp_any(late)) break;
      if (warp_any(late && wait.is_over(mine, *slot.port))) return false;
    }
    // Load after the flag was seen: data that a thread loaded before may be older.
    *pack = is_used ? load16_of_line(mine) : Pack{0, 0};
    return true;
  }

  PYCOLL_DEVICE void send(const Slot& slot, std::uint32_t unit, std::uint32_t bytes,
                          Pack pack) const {
    if (unit >= used(bytes)) return;
    if (is_last(unit)) pack.high = slot.step + 1;
    store16_of_line(reinterpret_cast<Pack*>(slot.data) + unit, pack);
  }
  PYCOLL_DEVICE static void finish(const Slot& /*slot*/, std::uint32_t /*bytes*/,
                                   std::uint32_t /*slot_bytes*/) {}
  PYCOLL_DEVICE static void empty(const Slot& /*slot*/, std::uint32_t /*bytes*/) {}

 private:
  PYCOLL_DEVICE std::uint32_t used(std::uint32_t bytes) const {
    return div_ceil_of(bytes, line_bytes()) * kLineUnits;
  }
  PYCOLL_DEVICE static bool is_last(std::uint32_t unit) {
    return unit % kLineUnits == kLineUnits - 1;
  }

  std::uint32_t last_width_;
};

// A slot holds packs of 16 bytes and, behind them, two lines of Ll for each pack. Between steps all
// packs are empty:
//
//   writer   stores a pack, or the pack's lines if one of its words is kEmpty
//   reader   polls the pack until neither of its words is kEmpty, and in some polls its lines, too.
//            Then it stores kEmpty over the pack that it has read. The release of the slot orders
//            that store before the writer's next stores
//
// The reader judges each word of 8 bytes by itself, so the order of arrival does not matter. Data
// are never rewritten on the way. Some steps clean, among them the first kDepth ones. In these all
// data travel as lines, the writer writes all lines, and the reader empties all packs. So the
// memory may begin with any content except lines of such a step. Zeros are not such lines.
class Pattern {
 public:
  static constexpr bool kDataBehindHeader = false;
  static constexpr std::uint32_t kParts = 1 + 2;  // of a slot, of equal bytes: packs, lines
  // Data may contain every pattern, but rarely this one. It is a NaN in every format of 16, 32 or
  // 64 bits. It is no repetition of a shorter pattern, so no array of equal elements below 8 bytes
  // is full of it.
  static constexpr std::uint64_t kEmpty = 0xffd3'7fe5'ffa9'7fb7;
  PYCOLL_DEVICE explicit Pattern(const Program& program)
      : packs_(program.slot_stride / kParts / kPackBytes) {}

  PYCOLL_DEVICE static std::uint32_t units(std::uint32_t bytes) {
    return div_ceil_of(bytes, kPackBytes);
  }
  PYCOLL_DEVICE static std::uint32_t offset(std::uint32_t unit) { return unit * kPackBytes; }
  PYCOLL_DEVICE static std::uint32_t width(std::uint32_t /*unit*/) { return kPackBytes; }

  PYCOLL_DEVICE static bool is_whole(Pack pack) {
    return pack.low != kEmpty && pack.high != kEmpty;
  }
  PYCOLL_DEVICE static Pack* pack_at(const Slot& slot, std::uint32_t unit) {
    return reinterpret_cast<Pack*>(slot.data) + unit;
  }
  PYCOLL_DEVICE Pack* lines_at(const Slot& slot, std::uint32_t unit) const {
    return reinterpret_cast<Pack*>(slot.data) + packs_ + 2 * unit;
  }

  PYCOLL_DEVICE bool receive(const Slot& slot, std::uint32_t unit, std::uint32_t /*bytes*/,
                             Pack* pack, Wait& wait) const {
    Pack* place = pack_at(slot, unit);
    const Pack* lines = lines_at(slot, unit);
    const bool cleans = Ll::cleans(slot.step);
    for (;;) {
      *pack = load16_relaxed(place);
      if (is_whole(*pack) && !cleans) break;
      if ((wait.looks_aside() || cleans) && Ll::look(lines, slot.step, pack)) break;
      if (wait.is_over(place, lines, *slot.port)) return false;
    }
    clear(place);
    return true;
  }

  PYCOLL_DEVICE void send(const Slot& slot, std::uint32_t unit, std::uint32_t /*bytes*/,
                          Pack pack) const {
    if (is_whole(pack) && !Ll::cleans(slot.step)) {
      store16_relaxed(pack_at(slot, unit), pack);
    } else {
      Ll::say(lines_at(slot, unit), slot.step, pack);
    }
  }

  PYCOLL_DEVICE void finish(const Slot& slot, std::uint32_t bytes,
                            std::uint32_t /*slot_bytes*/) const {
    if (!Ll::cleans(slot.step)) return;
    for (std::uint32_t unit = units(bytes) + thread(); unit < packs_; unit += threads()) {
      Ll::say(lines_at(slot, unit), slot.step, {0, 0});
    }
  }
  PYCOLL_DEVICE void empty(const Slot& slot, std::uint32_t bytes) const {
    if (!Ll::cleans(slot.step)) return;
    for (std::uint32_t unit = units(bytes) + thread(); unit < packs_; unit += threads()) {
      clear(pack_at(slot, unit));
    }
  }
  // A strong store, although the place is in the reader's memory: only strong accesses to one place
  // keep the order of this store and the writer's next store. Paired with the release in
  // close_slots() of executor.h, behind the block barrier.
  PYCOLL_DEVICE static void clear(Pack* place) { store16_relaxed(place, {kEmpty, kEmpty}); }

 private:
  std::uint32_t packs_;  // of a slot
};

}  // namespace pycoll::device
