// A second opinion on plan bytes, written from FORMAT.md alone: it shares no struct, no constant
// and no function with csrc/plan, so that both must be wrong in the same way before a harmful plan
// passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pycoll::testing {

// Walks a plan as an executor that trusts it would, and checks each step.
class PlanOracle {
 public:
  explicit PlanOracle(std::span<const std::byte> bytes) : bytes_(bytes) {}

  // Empty if nothing the plan says can lead out of bounds; otherwise what does.
  std::string find_harm() {
    if (bytes_.size() < 64) return "no header";
    collective_ = u8(6);
    lanes_ = u8(7);
    size_ = u32(8), rank_ = u32(12), root_ = u32(16);
    blocks_ = u32(20), parts_ = u32(24), scratch_ = u32(32);
    channels_ = u32(36), rows_ = u32(40);
    if (bytes_.size() != 64 + 8 * channels_ + 64 * rows_) return "tables and length differ";
    if (collective_ > 10 || rank_ >= size_ || root_ >= size_ || parts_ == 0) return "header";
    for (std::uint64_t i = 0; i < channels_ && harm_.empty(); ++i) look_at_channel(i);
    if (harm_.empty()) lay_out();
    for (std::uint64_t i = 0; i < rows_ && harm_.empty(); ++i) look_at_row(i);
    return harm_;
  }

 private:
  static constexpr std::uint64_t kToken = 0xffffffff;
  struct Extent {
    std::uint64_t begin = 0;
    std::uint64_t length = 0;
  };

  std::uint64_t number(std::size_t offset, std::size_t width) const {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i) {
      value |= std::to_integer<std::uint64_t>(bytes_[offset + i]) << (8 * i);
    }
    return value;
  }
  std::uint64_t u8(std::size_t offset) const { return number(offset, 1); }
  std::uint64_t u16(std::size_t offset) const { return number(offset, 2); }
  std::uint64_t u32(std::size_t offset) const { return number(offset, 4); }

  void harm(const std::string& what, std::uint64_t where) {
    if (harm_.empty()) harm_ = what + " at " + std::to_string(where);
  }

  void look_at_channel(std::uint64_t index) {
    const std::size_t at = 64 + 8 * index;
    if (u32(at) >= size_ || u32(at) == rank_) harm("channel to a wrong peer", index);
    if (u16(at + 4) > 6) harm("channel number", index);
    if (u8(at + 6) > 1) harm("channel direction", index);
    if (!ports_.insert(number(at, 8)).second) harm("channel listed twice", index);
  }

  // The table of FORMAT.md, row by row.
  bool in_input(std::uint64_t block) const {
    const bool whole[] = {true,           true,           rank_ == root_, true,
                          block == rank_, block == rank_, rank_ == root_, false,
                          true,           true,           false};
    if (collective_ != 7) return whole[collective_];
    return rank_ * size_ <= block && block < rank_ * size_ + size_;
  }
  bool in_output(std::uint64_t block) const {
    const bool whole[] = {true, rank_ == root_, true,           block == rank_,
                          true, rank_ == root_, block == rank_, false,
                          true, true,           false};
    if (collective_ != 7) return whole[collective_];
    return block >= rank_ && (block - rank_) % size_ == 0;
  }

  // Gives every block 5 elements and more, and lays buffers out densely, as a call would.
  void lay_out() {
    if (blocks_ > 4096 || parts_ > 4096) return;
    for (std::uint64_t block = 0; block < blocks_; ++block) {
      const std::uint64_t count = 5 + block % 3;
      const bool held[] = {in_input(block), in_output(block)};
      for (int side = 0; side < 2; ++side) {
        if (!held[side]) continue;
        std::uint64_t position = lengths_[side];
        for (std::uint64_t part = 0; part < parts_; ++part) {
          const std::uint64_t length = count / parts_ + (part < count % parts_ ? 1 : 0);
          places_[side][block * parts_ + part] = {position, length};
          position += length;
        }
        lengths_[side] += count;
      }
    }
    laid_out_ = true;
  }

  void look_at_slot(std::uint64_t buffer, std::uint64_t slot, std::uint64_t row) {
    if (buffer == 3) {
      if (slot >= scratch_) harm("scratch slot out of range", row);
      return;
    }
    const bool output = buffer == 2;
    if (slot >= blocks_ * parts_) return harm("slot names no chunk", row);
    if (!(output ? in_output(slot / parts_) : in_input(slot / parts_))) {
      return harm("slot is not held", row);
    }
    if (!laid_out_) return;
    const auto found = places_[output].find(slot);
    if (found == places_[output].end() ||
        found->second.begin + found->second.length > lengths_[output]) {
      harm("slot leaves its buffer", row);
    }
  }

  void look_at_ports(std::size_t at, std::uint64_t used, std::uint64_t direction,
                     std::uint64_t lane, std::uint64_t row) {
    std::set<std::uint64_t> seen;
    for (std::uint64_t i = 0; i < used; ++i) {
      const std::uint64_t port = u16(at + 2 * i);
      if (port >= channels_) return harm("channel index out of range", row);
      if (u8(64 + 8 * port + 6) != direction) harm("channel of the wrong direction", row);
      if (!seen.insert(port).second) harm("channel used twice in a row", row);
      if (lane_of_.emplace(port, lane).first->second != lane) harm("channel in two lanes", row);
    }
  }

  // "Codecs" of FORMAT.md.
  void look_at_codes(std::size_t at, std::uint64_t index) {
    const std::uint64_t recvs = u8(at + 5), sends = u8(at + 6), source = u8(at + 8);
    const std::uint64_t target = u8(at + 10), in = u8(at + 53), out = u8(at + 54);
    const std::uint64_t local = u8(at + 55);
    if (in == 0 && out == 0 && local == 0) return;
    if (u32(at) == kToken) harm("token with codes", index);
    if (local > 7 || in >> recvs != 0 || out >> sends != 0) harm("codes of nothing", index);
    if ((local & 1) != 0 && source != 3) harm("takes codes from an array", index);
    if ((local & 2) != 0 && target != 3) harm("puts codes into an array", index);
    const std::uint64_t operands = recvs + (source != 0) + (u8(at + 11) != 0);
    const bool relays = operands == 1 && (in != 0 || (local & 1) != 0);
    if ((local & 4) != 0 && relays) harm("encodes codes", index);
    if ((local & 4) != 0 && target == 0 && sends == 0) harm("encodes for nobody", index);
    if ((out != 0 || (local & 2) != 0) && (local & 4) == 0 && !relays) {
      harm("hands out codes that nobody made", index);
    }
    if ((u8(at + 7) & 28) != 0 || u8(at + 52) != 0) harm("codes in place", index);
  }

  void look_at_row(std::uint64_t index) {
    const std::size_t at = 64 + 8 * channels_ + 64 * index;
    const std::uint64_t chunk = u32(at), lane = u8(at + 4), recvs = u8(at + 5), sends = u8(at + 6);
    const std::uint64_t flags = u8(at + 7), source = u8(at + 8), target = u8(at + 10);
    if (chunk != kToken && chunk >= blocks_ * parts_) harm("row of no chunk", index);
    if (lane >= lanes_ || lane < last_lane_) harm("lane", index);
    last_lane_ = lane;
    if (recvs > 8 || sends > 8) return harm("more than eight channels", index);
    if (flags > 63 || source > 3 || target > 3 || target == 1) return harm("an enum", index);
    const std::uint64_t strategy = u8(at + 52);
    if (strategy > 2 || (strategy != 0 && (sends == 0 || chunk == kToken))) {
      harm("copy strategy", index);
    }
    if ((flags & 16) != 0 && (strategy == 0 || recvs != 0)) harm("awaits no window", index);
    if ((flags & 32) != 0 && recvs == 0) harm("announces to nobody", index);
    const std::uint64_t exposed = recvs != 0 ? target : source;
    if ((flags & 4) != 0 && (sends == 0 || exposed == 0 || exposed == 3))
      harm("exposes nothing", index);
    look_at_codes(at, index);
    if (u8(at + 9) > (source == 0 ? 0 : recvs)) harm("source_position", index);
    if (chunk == kToken && (source != 0 || target != 0)) harm("token with data", index);
    if (chunk == kToken && flags != 0) harm("token with flags", index);
    const std::uint64_t carry = u8(at + 11);
    if (carry != 0 && (chunk == kToken || recvs == 0)) harm("carry", index);
    const std::uint64_t operands = recvs + (source != 0) + (carry != 0);
    if (operands > 9) harm("more than nine operands", index);
    const bool copies = recvs == 1 && operands == 1 && target == 2;
    if ((flags & 8) != 0 && !copies) harm("direct write of a sum", index);
    if (carry != 0) look_at_slot(3, carry - 1, index);
    if (carry != 0 && written_.count({lane, carry - 1}) == 0) harm("carries no value", index);
    if (chunk != kToken && operands == 0) harm("row without operand", index);
    const bool reducing = collective_ <= 1 || collective_ == 3 || collective_ >= 8;
    if (chunk != kToken && operands > 1 && !reducing) harm("needless combination", index);
    look_at_ports(at + 20, recvs, 0, lane, index);
    look_at_ports(at + 36, sends, 1, lane, index);
    if (source != 0) look_at_slot(source, u32(at + 12), index);
    if (source == 3 && written_.count({lane, u32(at + 12)}) == 0) harm("reads no value", index);
    const bool reads_codes = (u8(at + 55) & 1) != 0;
    if (source == 3 && codes_[u32(at + 12)] != reads_codes) harm("mistakes codes", index);
    if (carry != 0 && codes_[carry - 1]) harm("carries codes", index);
    if (target != 0) look_at_slot(target, u32(at + 16), index);
    if (target == 3) written_.insert({lane, u32(at + 16)});
    if (target == 3) codes_[u32(at + 16)] = (u8(at + 55) & 2) != 0;
  }

  std::span<const std::byte> bytes_;
  std::string harm_;
  std::uint64_t collective_ = 0, lanes_ = 0, size_ = 0, rank_ = 0, root_ = 0, blocks_ = 0;
  std::uint64_t parts_ = 0, scratch_ = 0, channels_ = 0, rows_ = 0, last_lane_ = 0;
  std::set<std::uint64_t> ports_;
  std::map<std::uint64_t, std::uint64_t> lane_of_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> written_;
  std::map<std::uint64_t, bool> codes_;  // by scratch slot, whether it holds codes
  std::map<std::uint64_t, Extent> places_[2];
  std::uint64_t lengths_[2] = {0, 0};
  bool laid_out_ = false;
};

}  // namespace pycoll::testing
