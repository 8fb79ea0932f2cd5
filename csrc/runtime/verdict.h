// What to say when an operation cannot finish: pure functions from what the ranks have told each
// other to one Status. All ranks that see the same notices reach the same verdict in the same
// words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "transport/transport.h"

namespace pycoll::runtime {

// What one rank is known to do. `sequence` 0: nothing known.
struct Standing {
  int rank = 0;
  std::uint64_t sequence = 0;
  transport::Descriptor descriptor;
  transport::Shape shape{};
};

// Ranks disagree about operation `sequence`. The description that most ranks share is taken as
// meant (at a tie the one of the lowest rank); the others are at fault. Standings of other
// sequences count only if those of `sequence` agree: then ranks are at different operations. If
// that does not tell them apart either, the lengths of their arrays must differ, and no rank is
// named.
Status mismatch_verdict(std::uint64_t sequence, const std::vector<Standing>& standings);

// A message that did not come, or was not taken.
struct LateMessage {
  enum class Kind : std::uint8_t { kSend, kRecv, kRecvFromAny } kind = Kind::kRecv;
  int waiter = 0;  // the rank whose send or recv it is
  int peer = 0;    // its other side; of a recv from any rank the lowest other rank
  std::uint32_t tag = 0;
  // Of a recv: tags of what has come from whom it waits for and nobody received, ascending.
  std::vector<std::uint32_t> unreceived;
};

// A deadline that passed. All lists are ascending.
struct Overdue {
  double seconds = 0;
  // At fault.
  std::vector<int> absent;  // did not arrive; of a message: sent nothing, or did not take it
  std::vector<int> still;   // are in the operation, but sent nothing more
  std::vector<int> slow;    // answer, and wait for nobody
  // Not known to be at fault: they neither answered nor sent anything, and no rank that answers
  // waits for them.
  std::vector<int> unheard;
  // Where nobody is at fault.
  enum class Innocent : std::uint8_t {
    kNotAsked,
    kMoving,  // the operation moved until its deadline
    kCircle,  // all ranks answer, and wait for each other
  } innocent = Innocent::kNotAsked;
  bool cut = false;  // some rank waits for more ranks than its notice names
  // Empty if it is the engine's collective: then the verdict is told what that is.
  std::string beside;                  // the operation beside the engine
  std::optional<LateMessage> message;  // in place of an operation
};

// Why a rank speaks of what it waits for: Notice::inquiry.
enum class Inquiry : std::uint32_t {
  kNone,
  kDue,     // its own deadline has passed: all others are to answer
  kAnswer,  // another rank's has
  kLate,    // another rank's has, before this one waited in its operation
};

// What a rank last told of itself.
struct Account {
  struct Awaited {
    int rank = 0;
    bool sent = false;  // something of the operation has come from it
  };
  int rank = 0;
  Inquiry inquiry = Inquiry::kNone;  // kNone: it does not answer
  std::uint64_t sequence = 0;        // of the newest operation it has entered
  std::uint64_t completed = 0;
  double still = 0;  // seconds for which its operation has not moved
  // Whom it waits for in the operation, or, without one, in messages.
  std::vector<Awaited> awaited;
  bool cut = false;  // it waits for more
};
Account account_of(int rank, int size, const transport::Notice& notice);
// The same, as far as it fits, into a notice; the rank and its sequence travel elsewhere.
void write_account(const Account& account, transport::Notice* notice);

// How long the rank whose deadline has passed waits for the answers of the others.
Nanoseconds grace_of(double seconds);

// Completes `overdue`, of rank `due`, by whom it is to name: the ranks that do not answer, at the
// ends of all chains of waiting that begin with ranks in the operation. accounts[r] is of rank r.
void find_guilty(int due, const std::vector<Account>& accounts, Overdue* overdue);

// How a rank tells its peers, so that all say the same: fits in Notice::detail, for which a list of
// very many ranks or tags is cut.
std::string to_detail(const Overdue& overdue);
// Whatever a peer wrote gives something harmless: ranks outside [0, size) are dropped.
Overdue overdue_from(const std::string& detail, int size);

// `collective` is the operation unless `overdue` names another.
Status timeout_verdict(const std::string& collective, const Overdue& overdue,
                       const std::vector<std::string>& names);

// Ranks called a collective and an operation beside the engine in different orders: some wait in
// the one on arrays of the host, others in the other on arrays of devices.
struct Apart {
  std::vector<int> odd;      // ranks at fault, ascending
  bool odd_on_host = false;  // they are those in the host's collective
  std::uint64_t sequence = 0;
  transport::Descriptor descriptor;  // of the host's collective
  std::string beside;                // "device all_reduce of 4 float32, op sum"
};

// The smaller side is at fault, at a tie the one without the lowest rank. Requires: neither is
// empty.
void blame(std::vector<int> on_host, std::vector<int> on_devices, Apart* apart);

// How a rank tells its peers; sequence and descriptor travel as those of the notice. A list of very
// many ranks is cut.
std::string to_detail(const Apart& apart);
bool is_apart(const std::string& detail);
// As overdue_from.
Apart apart_from(const std::string& detail, int size);
Status order_verdict(const Apart& apart, const std::vector<std::string>& names);

// What a rank says of itself: how many operations beside the engine it has called.
inline constexpr std::uint64_t kUncounted = ~std::uint64_t{0};
std::string besides_detail(std::uint64_t count);
// kUncounted where nothing is said of it.
std::uint64_t besides_from(const std::string& detail);

// `rank` takes no part in operation `sequence`, since it has refused its arguments.
Status refusal_verdict(int rank, std::uint64_t sequence, const std::string& why,
                       const std::vector<std::string>& names);

// `rank` died or left while `operation` was under way; `how` is a fact of the Status, too.
Status peer_lost_verdict(int rank, const std::string& how, const std::string& operation,
                         const std::vector<std::string>& names);

// "operation 7 (all_reduce of 4 float32, op sum)"
std::string name_operation(std::uint64_t sequence, const transport::Descriptor& descriptor);
// "recv from rank 3 with tag 5", "send to rank 3 with tag 5", "recv from any rank with tag 5"
std::string name_message(LateMessage::Kind kind, int peer, std::uint32_t tag);
// "rank 3 (host:4711)"
std::string name_rank(int rank, const std::vector<std::string>& names);
// "ranks 1, 2 and 5"; "rank 1"
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace pycoll::runtime
