#include "device/exchange.h"

#include "runtime/verdict.h"

namespace pycoll::device {
namespace {

// A byte in front of what is told: a Code.
char byte_of(const Status& status) { return static_cast<char>(status.code()); }

}  // namespace

Status exchange_or_fail(const Exchange& exchange, const Status& mine_status,
                        const std::string& mine, const std::vector<std::string>& names,
                        std::vector<std::string>* all) {
  std::vector<std::string> told;
  const std::string& rest = mine_status.ok() ? mine : mine_status.message();
  Status status = exchange(byte_of(mine_status) + rest, &told);
  if (!mine_status.ok()) return mine_status;
  if (!status.ok()) return status;
  all->clear();
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    const std::string& one = told[rank];
    const auto code = static_cast<Code>(one.empty() ? '\0' : one[0]);
    if (code != Code::kOk) {
      const int number = static_cast<int>(rank);
      return Status::error(code, runtime::name_rank(number, names) + ": " + one.substr(1),
                           {number});
    }
    all->push_back(one.substr(one.empty() ? 0 : 1));
  }
  return Status();
}

}  // namespace pycoll::device
