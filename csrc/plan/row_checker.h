// Checks the rules of FORMAT.md about rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "plan/plan.h"

namespace pycoll::plan {

// Checks the rows of one plan in order. It records the lane that uses each channel, the lane that
// last wrote each scratch slot, and whether it wrote codes there. One thread.
class RowChecker {
 public:
  // Requires: header and channels have been checked; both outlive the checker.
  RowChecker(const Header& header, std::span<const Channel> channels)
      : header_(header),
        channels_(channels),
        data_chunks_(std::uint64_t{header.block_count} * header.parts),
        channel_lane_(channels.size(), kUnused),
        slot_lane_(header.scratch_slots, kUnused),
        slot_coded_(header.scratch_slots, false) {}

  // Fails with kInvalidArgument that names the first field that breaks a rule. The caller passes
  // `index` 0, 1, 2, ...
  Status check(const Row& row, std::size_t index);

 private:
  static constexpr std::uint8_t kUnused = 0xff;

  std::string place() const { return "row " + std::to_string(index_); }
  Status check_scalars(const Row& row) const;
  Status check_meaning(const Row& row) const;
  static bool has_lasting_memory(const Row& row);
  static bool copies_to_output(const Row& row);
  Status check_ports(const Row& row, std::string_view field, std::span<const std::uint16_t> ports,
                     std::uint8_t used, Direction direction);
  Status check_source(const Row& row) const;
  Status check_carry(const Row& row) const;
  Status check_codes(const Row& row) const;
  Status check_mask(std::string_view field, std::uint8_t mask, std::uint8_t used,
                    std::string_view ports) const;
  Status check_written(std::string_view field, std::uint32_t slot, bool coded,
                       const Row& row) const;
  Status check_target(const Row& row);
  Status check_place(std::string_view field, std::uint32_t chunk, Buffer buffer) const;

  const Header& header_;
  std::span<const Channel> channels_;
  std::uint64_t data_chunks_;
  std::vector<std::uint8_t> channel_lane_;
  std::vector<std::uint8_t> slot_lane_;
  std::vector<bool> slot_coded_;
  std::size_t index_ = 0;
  std::uint8_t lane_ = 0;  // lane of the previous row
};

}  // namespace pycoll::plan
