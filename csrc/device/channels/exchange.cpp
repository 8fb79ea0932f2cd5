#include "device/channels/exchange.h"

#include "engine/diagnosis/verdict.h"

namespace pycoll::device {
namespace {

// The first byte of each rank's text: its Code.
char byte_of(const Status& status) { return static_cast<char>(status.code()); }

}  // namespace

Status exchange_or_fail(const Exchange& exchange, const Status& mine_status,
                        const std::string& mine, const std::vector<std::string>& names,
                        std::vector<std::string>* all) {
  std::vector<std::string> received;
  const std::string& rest = mine_status.ok() ? mine : mine_status.message();
  Status status = exchange(byte_of(mine_status) + rest, &received);
  if (!mine_status.ok()) return mine_status;
  if (!status.ok()) return status;
  all->clear();
  for (std::size_t rank = 0; rank < received.size(); ++rank) {
    const std::string& one = received[rank];
    const auto code = static_cast<Code>(one.empty() ? '\0' : one[0]);
    if (code != Code::kOk) {
      const int number = static_cast<int>(rank);
      return Status::error(code, engine::name_rank(number, names) + ": " + one.substr(1), {number});
    }
    all->push_back(one.substr(one.empty() ? 0 : 1));
  }
  return Status();
}

}  // namespace pycoll::device
