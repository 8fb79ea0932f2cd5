// Verdicts: pure functions from the notices of all ranks to one Status, for an operation that
// cannot finish. All ranks that see the same notices reach the same verdict in the same words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/operations/late_message.h"
#include "engine/operations/numbers.h"
#include "transport/transport.h"

namespace pycoll::engine {

// The operation that one rank is in, as far as known. `sequence` 0: unknown.
struct Standing {
  int rank = 0;
  std::uint64_t sequence = 0;
  transport::Descriptor descriptor;
  // The first array in which the calls differ, or an empty text, if the ranks have found it.
  std::optional<std::string> array = std::nullopt;
};

// Verdict for ranks that disagree about operation `sequence`. The description that most ranks share
// is taken as intended (at a tie the one of the lowest rank); the other ranks are at fault. If all
// descriptions of `sequence` agree, standings of other sequences count: the ranks are at different
// operations. If these agree too, the lengths of arrays must differ, and no rank is named.
// `equal_arrays`: the ranks have compared all their arrays and found no difference.
Status mismatch_verdict(std::uint64_t sequence, const std::vector<Standing>& standings,
                        bool equal_arrays = false);

// A deadline that has passed. All lists are ascending.
struct Overdue {
  double seconds = 0;
  // At fault.
  std::vector<int> absent;  // did not arrive; for a message: sent nothing, or did not take it
  std::vector<int> still;   // are in the operation, but sent nothing more
  std::vector<int> slow;    // answer, and wait for no rank
  // Not known to be at fault: they neither answered nor sent
  // anything, and no rank that answers waits for them.
  std::vector<int> unheard;
  // The reason, if no rank is at fault.
  enum class Innocent : std::uint8_t {
    kNotAsked,
    kMoving,  // the operation moved until its deadline
    kCircle,  // all ranks answer, and wait for each other
  } innocent = Innocent::kNotAsked;
  bool cut = false;  // some rank waits for more ranks than its notice names
  // Empty for a collective of the engine; timeout_verdict() gets its name as an argument.
  std::string on_stream;               // the operation on the device stream
  std::optional<LateMessage> message;  // instead of an operation
};

// The text that a rank tells its peers, so that all ranks report the same. It fits in
// Notice::detail; a list of very many ranks or tags is cut.
std::string to_detail(const Overdue& overdue);
// The inverse of to_detail(). Accepts any text from a peer; ranks outside [0, size) are dropped.
Overdue overdue_from(const std::string& detail, int size);

// `collective` is the operation, unless `overdue` names another one.
Status timeout_verdict(const std::string& collective, const Overdue& overdue,
                       const std::vector<std::string>& names);

// Ranks have called a collective and an operation on the device stream in different orders: some
// wait in the one on host arrays, others in the one on device arrays.
struct Apart {
  std::vector<int> odd;      // ranks at fault, ascending
  bool odd_on_host = false;  // the ranks at fault are in the host's collective
  std::uint64_t sequence = 0;
  transport::Descriptor descriptor;  // of the host's collective
  std::string on_stream;             // "device all_reduce of 4 float32, op sum"
};

// Puts the smaller group at fault; at a tie the group without the
// lowest rank. Requires: both groups have ranks.
void blame(std::vector<int> on_host, std::vector<int> on_devices, Apart* apart);

// The text that a rank tells its peers; sequence and descriptor travel in
// the notice. A list of very many ranks is cut.
std::string to_detail(const Apart& apart);
bool is_apart(const std::string& detail);
// As overdue_from().
Apart apart_from(const std::string& detail, int size);
Status order_verdict(const Apart& apart, const std::vector<std::string>& names);

// The text in which a rank tells how many operations on the device stream it has called.
std::string stream_detail(std::uint64_t count);
// kUncounted if the text tells no count.
std::uint64_t streams_from(const std::string& detail);

// `rank` takes no part in operation `sequence` because it
// has refused its arguments; `why` is the reason.
Status refusal_verdict(int rank, std::uint64_t sequence, const std::string& why,
                       const std::vector<std::string>& names);

// `rank` died or closed while `operation` was in progress; `how` is also a fact of the Status.
Status peer_lost_verdict(int rank, const std::string& how, const std::string& operation,
                         const std::vector<std::string>& names);

// "operation 7 (all_reduce of 4 float32, op sum)"
std::string name_operation(std::uint64_t sequence, const transport::Descriptor& descriptor);
// "rank 3 (host:4711)"
std::string name_rank(int rank, const std::vector<std::string>& names);
// "ranks 1, 2 and 5"; "rank 1"
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace pycoll::engine
