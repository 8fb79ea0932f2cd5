// Error texts for a refused plan: place, field, value, bound, and what to do.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace pycoll::plan {

inline Status violation(const std::string& place, std::string_view field, std::uint64_t value,
                        const std::string& bound) {
  return Status::error(Code::kInvalidArgument,
                       "plan: " + place + ": " + std::string(field) + " is " +
                           std::to_string(value) + ", must be " + bound +
                           "; the plan is damaged or made by another version, lower it again");
}

inline std::string below(std::string_view field, std::uint64_t bound) {
  return "below " + std::string(field) + ", which is " + std::to_string(bound);
}

inline std::string at_most(std::uint64_t bound) { return "at most " + std::to_string(bound); }

inline std::string entry(std::string_view field, std::size_t index) {
  return std::string(field) + "[" + std::to_string(index) + "]";
}

}  // namespace pycoll::plan
