// How ranks exchange fixed structs before there are channels, and fail together.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace pycoll::device {

// Sends bytes of any length from every rank to every rank; a collective call. `all` is by rank,
// this rank's included. After a failure nothing more can be exchanged.
using Exchange = std::function<Status(const std::string& mine, std::vector<std::string>* all)>;

// Gives every rank's bytes if `mine_status` is ok on every rank. Otherwise all ranks return a
// failure: their own, or that of the lowest rank that failed, with its name.
Status exchange_or_fail(const Exchange& exchange, const Status& mine_status,
                        const std::string& mine, const std::vector<std::string>& names,
                        std::vector<std::string>* all);

// exchange_or_fail() of one struct per rank. kTransport if a struct has another size here.
template <typename T>
Status exchange_or_fail(const Exchange& exchange, const Status& mine_status, const T& mine,
                        const std::vector<std::string>& names, std::vector<T>* all) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<std::string> received;
  const std::string bytes(reinterpret_cast<const char*>(&mine), sizeof(T));
  Status status = exchange_or_fail(exchange, mine_status, bytes, names, &received);
  if (!status.ok()) return status;
  all->clear();
  for (const std::string& one : received) {
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
