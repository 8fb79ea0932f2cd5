// Decides which pairs of ranks use each other's device memory, from what each end found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace pycoll::device {

// The result of one rank's attempt to use another rank's memory.
struct Finding {
  enum class Way : char {
    kReached = 'y',  // kernels write there
    kApart = 'n',    // another machine, or one that does not join the two devices
    kRefused = 'r',  // the driver does not share the memory, though the machine could
    kCorrupt = 'c',  // the bytes read are not the bytes written
  };
  Way way = Way::kApart;
  std::string why;  // of kRefused and kCorrupt: for users
};

// The findings of all ranks, by rank and then by peer; the same on all ranks.
using Findings = std::vector<std::vector<Finding>>;

// The text of a rank's findings, by peer, that it sends to the others.
std::string to_told(const std::vector<Finding>& mine);
// kTransport for a text that no rank of this version sends.
Status from_told(const std::vector<std::string>& texts, Findings* all);

// Whether both ends of the pair found that their kernels reach the memory. The pair then uses it.
// Otherwise the host proxy moves the pair's segments.
bool is_reached(const Findings& all, std::size_t one, std::size_t other);
bool is_any_proxied(const Findings& all);
// Whether the driver refuses to share some rank's memory.
bool is_any_refused(const Findings& all);
// For users: why pairs use the host proxy although the machine could connect their devices. One
// line for each reason, with its first pair. `devices` are by rank: "device 0 (NVIDIA H100) of rank
// 1 (host:4711)".
std::vector<std::string> warnings_of(const Findings& all, const std::vector<std::string>& devices);

}  // namespace pycoll::device
