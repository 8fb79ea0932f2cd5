// A validated plan that owns its bytes. Immutable, so any number of threads may read it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "plan/direct_writes.h"
#include "plan/leading_rows.h"
#include "plan/plan.h"

namespace pycoll::plan {

class Image {
 public:
  // Copies and validates `bytes`. On failure *image is unchanged and the status (kInvalidArgument)
  // names the first violation.
  static Status load(std::span<const std::byte> bytes, std::shared_ptr<const Image>* image);

  const Plan& plan() const { return plan_; }
  const Header& header() const { return *plan_.header; }
  const DirectWrites& direct_writes() const { return direct_writes_; }
  // Number of leading rows by lane; see leading_rows.h.
  const std::vector<std::uint32_t>& leading_rows() const { return leading_rows_; }

  // The properties of the collective that an executor needs; layout.h has the rules.
  bool holds_input(std::uint32_t block) const;
  bool holds_output(std::uint32_t block) const;
  std::uint32_t output_group(std::uint32_t block) const;
  // Number of ranks whose values are in a complete value.
  std::uint32_t contributors() const;
  // Whether every second operation of several tiles runs backward (FORMAT.md, "Tiles"). Operations
  // with servers do not, so that one of them can be dropped while later ones run.
  bool alternates() const;

 private:
  Image() = default;

  std::vector<std::uint64_t> words_;  // the plan's bytes, aligned for every field
  Plan plan_{};
  DirectWrites direct_writes_;
  std::vector<std::uint32_t> leading_rows_;
};

}  // namespace pycoll::plan
