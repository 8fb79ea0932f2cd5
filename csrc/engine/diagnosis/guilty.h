// Finds the ranks to name when a deadline has passed, from the ranks for which each rank waits.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "engine/diagnosis/verdict.h"
#include "engine/operations/late_message.h"
#include "transport/transport.h"

namespace pycoll::engine {

// Why a rank tells which ranks it waits for: Notice::inquiry.
enum class Inquiry : std::uint32_t {
  kNone,
  kDue,     // its own deadline has passed: all other ranks must answer
  kAnswer,  // another rank's deadline has passed
  kLate,    // another rank's deadline passed before this rank waited in its operation
};

// The state that a rank last told in its notice.
struct Account {
  using Wait = PeerWait;
  int rank = 0;
  Inquiry inquiry = Inquiry::kNone;  // kNone: it does not answer
  std::uint64_t sequence = 0;        // of the newest operation it has entered
  std::uint64_t completed = 0;
  double still = 0;  // seconds for which its operation has not moved
  // The ranks it waits for in the operation; without an operation, in messages.
  std::vector<Wait> waits;
  bool cut = false;  // it waits for more ranks
};
Account account_of(int rank, int size, const transport::Notice& notice);
// Writes as much of `account` into a notice as fits; rank and sequence are not included.
void write_account(const Account& account, transport::Notice* notice);

// How long the rank whose deadline has passed waits for the answers of the others.
Nanoseconds grace_of(double seconds);

// Completes `overdue`, of rank `due`, with the ranks to name: those that do not answer, at the ends
// of all chains of waiting that begin at ranks in the operation. accounts[r] is of rank r.
void find_guilty(int due, const std::vector<Account>& accounts, Overdue* overdue);

}  // namespace pycoll::engine
