#include "transport/verbs/link/verbs_grants.h"

#include <cstring>

#include "base/assert.h"

namespace pycoll::transport::verbs {

std::string Grants::grant(std::uint64_t offset, std::size_t bytes) {
  const Region& region = rails_.front().region();
  PYCOLL_ASSERT(region.peers_write && offset <= region.bytes && bytes <= region.bytes - offset,
                "a grant of %zu bytes at %llu", bytes, static_cast<unsigned long long>(offset));
  Grant made;
  made.address = region.address + offset;
  made.bytes = bytes;
  for (const Rail& rail : rails_) made.rkeys[rail.index()] = rail.region_keys().rkey;
  granted_ = true;
  return {reinterpret_cast<const char*>(&made), sizeof(made)};
}

Status Grants::accept(const std::string& grant) {
  Grant given;
  if (grant.size() == sizeof(given)) std::memcpy(&given, grant.data(), sizeof(given));
  if (grant.size() != sizeof(given) || given.magic != Grant::kMagic || given.bytes == 0 ||
      given.address + given.bytes < given.bytes) {
    return Status::error(Code::kInvalidArgument,
                         "verbs: " + std::to_string(grant.size()) + " bytes from " + peer_name_ +
                             " are no grant of this pycoll version; run the same on every rank",
                         {peer_});
  }
  accepted_ = given;
  return {};
}

Target Grants::target(std::uint64_t offset, std::uint32_t bytes, const Rail& rail) const {
  PYCOLL_ASSERT(offset <= accepted_.bytes && bytes <= accepted_.bytes - offset,
                "%u bytes to %llu of a grant of %llu", bytes,
                static_cast<unsigned long long>(offset),
                static_cast<unsigned long long>(accepted_.bytes));
  return {accepted_.address + offset, accepted_.rkeys[rail.index()]};
}

}  // namespace pycoll::transport::verbs
