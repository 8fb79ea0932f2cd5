// The memory that the two ends of a link let each other write: the part of this rank's region that
// the peer may write, and the part of the peer's region that this rank may write.
//
// Threads: those of the Transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/verbs/verbs_rail.h"

namespace pycoll::transport::verbs {

class Grants {
 public:
  // `rails` are the link's, and `peer_name` names the peer `peer` in errors.
  Grants(const std::vector<Rail>& rails, const std::string& peer_name, int peer)
      : rails_(rails), peer_name_(peer_name), peer_(peer) {}

  // As Regions::grant and Regions::accept.
  std::string grant(std::uint64_t offset, std::size_t bytes);
  Status accept(const std::string& grant);

  // Whether the peer may write payloads to this rank's region.
  bool has_granted() const { return granted_; }
  // The place of `bytes` bytes at `offset` of the accepted part, for a message over `rail`.
  // Requires: they lie in that part.
  Target target(std::uint64_t offset, std::uint32_t bytes, const Rail& rail) const;

 private:
  const std::vector<Rail>& rails_;
  const std::string& peer_name_;
  const int peer_;
  bool granted_ = false;
  Grant accepted_;  // from the peer; 0 bytes: none was accepted
};

}  // namespace pycoll::transport::verbs
