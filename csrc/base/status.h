// The result type of every function below the bindings that can fail. A Status is a value, and
// success is a null pointer, so that the check for success costs one comparison. The function that
// detects a fault writes the message; its callers only pass it on. Several threads may copy and
// read one Status, but not assign to it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pycoll {

// The values are sent to other processes in notices; never renumber them.
enum class Code : std::uint32_t {
  kOk = 0,
  kInvalidArgument = 1,  // the request is wrong and had no effect
  kMismatch = 2,         // ranks disagree about an operation
  kPeerLost = 3,         // a peer ended or left during an operation
  kTimeout = 4,          // a deadline passed
  kClosed = 5,           // the communicator was closed
  kTransport = 6,        // the medium failed, but no peer ended
  kInterrupted = 7,      // the caller stopped the wait (Ctrl-C)
  kReduction = 8,        // a rank sent codes that do not decode
};

class [[nodiscard]] Status {
 public:
  Status() = default;

  // `ranks` are the ranks at fault in ascending order, or empty. `how` is the observation that
  // showed the end of a peer; the message contains it too.
  static Status error(Code code, std::string message, std::vector<int> ranks = {},
                      std::string how = {}) {
    Status status;
    status.facts_ = std::make_shared<const Facts>(
        Facts{code, std::move(message), std::move(ranks), std::move(how)});
    return status;
  }

  bool ok() const { return facts_ == nullptr; }
  Code code() const { return facts_ ? facts_->code : Code::kOk; }
  // A sentence for users: argument, value, bound, rank, what to do. Empty if ok().
  const std::string& message() const { return facts_ ? facts_->message : empty_text(); }
  // The observation that showed the end of a peer; empty if there is none.
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

// Makes the error for a request that the caller must correct.
inline Status invalid_argument(std::string message) {
  return Status::error(Code::kInvalidArgument, std::move(message));
}

}  // namespace pycoll
