// How anything below the bindings reports failure. A Status is a value: success is a null pointer,
// so the good path costs one comparison. The function that recognises a fault writes the message;
// callers only pass it on. Safe to copy and to read from several threads; not to assign from
// several.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pycoll {

// The values cross process borders inside notices; never renumber.
enum class Code : std::uint32_t {
  kOk = 0,
  kInvalidArgument = 1,  // a wrong request; nothing was touched
  kMismatch = 2,         // ranks disagree about an operation
  kPeerLost = 3,         // a peer died or left in the middle of an operation
  kTimeout = 4,          // a deadline passed
  kClosed = 5,           // the communicator was closed
  kTransport = 6,        // the medium failed for a reason that is not a peer's death
  kInterrupted = 7,      // the caller asked to stop waiting (Ctrl-C)
};

class [[nodiscard]] Status {
 public:
  Status() = default;

  // `ranks` are the ranks at fault, in ascending order; empty when no rank is. `how`: what was seen
  // of a peer's end, which the message tells, too.
  static Status error(Code code, std::string message, std::vector<int> ranks = {},
                      std::string how = {}) {
    Status status;
    status.facts_ = std::make_shared<const Facts>(
        Facts{code, std::move(message), std::move(ranks), std::move(how)});
    return status;
  }

  bool ok() const { return facts_ == nullptr; }
  Code code() const { return facts_ ? facts_->code : Code::kOk; }
  // Empty when ok. A sentence for users: argument, value, bound, rank, what to do.
  const std::string& message() const { return facts_ ? facts_->message : empty_text(); }
  // Empty where nothing is known.
  const std::string& how() const { return facts_ ? facts_->how : empty_text(); }
  const std::vector<int>& ranks() const { return facts_ ? facts_->ranks : empty_ranks(); }

 private:
  struct Facts {
    Code code;
    std::string message;
    std::vector<int> ranks;
    std::string how;
  };
  static const std::string& empty_text() {
    static const std::string text;
    return text;
  }
  static const std::vector<int>& empty_ranks() {
    static const std::vector<int> ranks;
    return ranks;
  }
  std::shared_ptr<const Facts> facts_;
};

}  // namespace pycoll
