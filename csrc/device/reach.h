// Which pairs of ranks use each other's device memory: what each end found, and what follows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace pycoll::device {

// What a rank found out about the memory of another one.
struct Finding {
  enum class Way : char {
    kReached = 'y',  // kernels write there
    kApart = 'n',    // another machine, or one that does not join the two devices
    kRefused = 'r',  // the driver does not share the memory, against what the machine could do
    kCorrupt = 'c',  // what was written is not what is read
  };
  Way way = Way::kApart;
  std::string why;  // of kRefused and kCorrupt: for users
};

// What all found, by rank and then by peer; the same on all ranks.
using Findings = std::vector<std::vector<Finding>>;

// How a rank tells the others what it found, by peer.
std::string to_told(const std::vector<Finding>& mine);
// kTransport for what no rank of this version tells.
Status from_told(const std::vector<std::string>& told, Findings* all);

// Both ends of a pair found that kernels reach the memory; the pair uses it. Otherwise the host
// carries its segments.
bool is_reached(const Findings& all, std::size_t one, std::size_t other);
bool is_any_carried(const Findings& all);
// A driver does not share some memory.
bool is_any_refused(const Findings& all);
// For users: why pairs are carried that the machine could join, a line for each reason with the
// first such pair. `devices` are by rank: "device 0 (NVIDIA H100) of rank 1 (host:4711)".
std::vector<std::string> warnings_of(const Findings& all, const std::vector<std::string>& devices);

}  // namespace pycoll::device
