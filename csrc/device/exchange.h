// How ranks tell each other fixed structs before there are channels, and fail together.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace pycoll::device {

// Bytes from every rank to every rank, of any lengths; a collective call. `all` is by rank, this
// rank's included. Not ok: nothing more can be exchanged.
using Exchange = std::function<Status(const std::string& mine, std::vector<std::string>* all)>;

// Every rank's bytes if `mine_status` is ok on every rank. Otherwise this rank's own failure, or
// that of the lowest rank that failed, named; either on all ranks at once.
Status exchange_or_fail(const Exchange& exchange, const Status& mine_status,
                        const std::string& mine, const std::vector<std::string>& names,
                        std::vector<std::string>* all);

// The same for structs.
template <typename T>
Status exchange_or_fail(const Exchange& exchange, const Status& mine_status, const T& mine,
                        const std::vector<std::string>& names, std::vector<T>* all) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<std::string> told;
  const std::string bytes(reinterpret_cast<const char*>(&mine), sizeof(T));
  Status status = exchange_or_fail(exchange, mine_status, bytes, names, &told);
  if (!status.ok()) return status;
  all->clear();
  for (const std::string& one : told) {
    if (one.size() != sizeof(T)) {
      return Status::error(Code::kTransport,
                           "device arrays: ranks run different versions of pycoll");
    }
    T value;
    std::memcpy(&value, one.data(), sizeof(T));
    all->push_back(value);
  }
  return Status();
}

}  // namespace pycoll::device
