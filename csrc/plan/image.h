// A validated plan that owns its bytes. Immutable, so any number of threads may read it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "plan/landings.h"
#include "plan/leads.h"
#include "plan/plan.h"

namespace pycoll::plan {

class Image {
 public:
  // Copies and validates `bytes`; on failure *image stays as it was and the status names the first
  // violation (kInvalidArgument).
  static Status load(std::span<const std::byte> bytes, std::shared_ptr<const Image>* image);

  const Plan& plan() const { return plan_; }
  const Header& header() const { return *plan_.header; }
  const Landings& landings() const { return landings_; }
  // By lane: how many of its rows lead it.
  const std::vector<std::uint32_t>& leads() const { return leads_; }

 private:
  Image() = default;

  std::vector<std::uint64_t> words_;  // the bytes, aligned for every field
  Plan plan_{};
  Landings landings_;
  std::vector<std::uint32_t> leads_;
};

}  // namespace pycoll::plan
