// What ranks on the fake driver's devices tell when something goes wrong, and checks that several
// ways between devices share.
#pragma once

#include <chrono>
#include <thread>
#include <vector>

#include "tests/cpp/device/cuda_ranks.h"

namespace pycoll::testing {

inline void check_open(CudaRanks& ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    CHECK(ranks[rank].opened.ok(), "rank %zu: %s", rank, ranks[rank].opened.message().c_str());
  }
}

// Waits for it, 10 s at most.
inline Status failure_of(const CudaRank& rank) {
  Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    status = rank.communicator->watch_thread().failure();
  }
  return status;
}

// Two ranks that call with different operations: at least one of them names the other.
inline void check_disagreement_is_told(CudaRanks& ranks) {
  CudaCase one(ranks, cuda_scenario("all_reduce/direct", 2, 50));
  auto request = one.request(0);
  CHECK(ranks[0].communicator->launch(request, 1, ranks[0].stream).ok(), "rank 0");
  request = one.request(1);
  request.descriptor.op = ReduceOp::kMax;
  CHECK(ranks[1].communicator->launch(request, 1, ranks[1].stream).ok(), "rank 1");
  int told = 0;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const Status status = failure_of(ranks[rank]);
    (void)one.output(rank);
    if (status.code() != Code::kMismatch) continue;
    ++told;
    CHECK(status.ranks() == std::vector<int>{1 - static_cast<int>(rank)}, "%s",
          status.message().c_str());
  }
  CHECK(told > 0, "nobody says what is wrong");
}

}  // namespace pycoll::testing
