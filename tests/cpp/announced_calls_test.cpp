// A rank that takes part in collectives as another one announces them: a parameter server.
#include <cstring>

#include "communicator_world.h"

using namespace pycoll;
using namespace pycoll::testing;
using engine::AnnouncedCalls;
using engine::Communicator;

namespace {

constexpr int kWorkers = 2, kServer = 2;
constexpr std::uint32_t kTag = 7;
constexpr Element kEnd = 0;

// The request of a rank for arrays of `count` elements; a server has none.
executor::CollectiveRequest request_of(int rank, std::size_t count, std::vector<Element>& data) {
  auto request = all_reduce(served_plan(kWorkers + 1, rank), data, data);
  request.counts = {count};
  request.descriptor.count = count;
  request.segment_bytes = 64;
  return request;
}

// Worker 0 announces the number of elements of the next collective.
void announce(Communicator& rank, Element count) {
  if (rank.rank() != 0) return;
  std::vector<Element> word = {count};
  expect_ok(rank.run(send_to(kServer, kTag, word), kPatience, nullptr), "announcement");
}

// What serve() returns when the server has heard the end, or an error.
struct Served {
  Status status;
  std::uint64_t begun = 0;
  int unknown = 0;
};

Served served_by(Communicator& rank) {
  AnnouncedCalls calls;
  calls.tag = kTag;
  calls.ahead_max = 2;
  Served found;
  std::vector<Element> none;
  while (true) {
    std::string text;
    found.status = rank.serve(calls, kPatience, nullptr, &text);
    if (!found.status.ok()) break;
    Element count = 0;
    CHECK(text.size() == sizeof(count), "%zu bytes", text.size());
    std::memcpy(&count, text.data(), sizeof(count));
    if (count == kEnd) {
      found.status = rank.finish(calls, nullptr);
      break;
    }
    ++found.unknown;
    rank.begin(calls, text, request_of(kServer, count, none), kPatience);
  }
  found.begun = calls.begun;
  return found;
}

}  // namespace

TEST(a_server_begins_each_collective_that_is_announced) {
  constexpr int kRounds = 60;
  constexpr std::size_t kCounts[] = {1, 23, 300};
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(kWorkers + 1, fabric);
    on_threads({0, 1, kServer}, [&](int rank) {
      Communicator& mine = world.at(rank);
      if (rank == kServer) {
        const Served found = served_by(mine);
        expect_ok(found.status, "server");
        CHECK(found.begun == kRounds && found.unknown == 3, "%llu begun, %d unknown",
              static_cast<unsigned long long>(found.begun), found.unknown);
        return;
      }
      // Several are under way at a time, and more than the server lets them be ahead.
      std::vector<std::vector<Element>> data;
      std::vector<std::shared_ptr<engine::Operation>> started;
      for (int round = 0; round < kRounds; ++round) {
        data.push_back(input_of(rank, round, kCounts[round % 3]));
      }
      for (int round = 0; round < kRounds; ++round) {
        auto& mine_now = data[static_cast<std::size_t>(round)];
        announce(mine, mine_now.size());
        started.push_back(mine.start(request_of(rank, mine_now.size(), mine_now), kPatience));
      }
      for (int round = 0; round < kRounds; ++round) {
        const auto place = static_cast<std::size_t>(round);
        expect_ok(mine.drive(*started[place], kForever, nullptr), "worker");
        CHECK(data[place] == sum_of(kWorkers, round, data[place].size()), "round %d", round);
      }
      announce(mine, kEnd);
    });
  }
}

TEST(a_server_goes_on_after_a_worker_has_refused_its_arguments) {
  for (const Fabric fabric : kFabrics) {
    CommunicatorWorld world(kWorkers + 1, fabric);
    on_threads({0, 1, kServer}, [&](int rank) {
      Communicator& mine = world.at(rank);
      if (rank == kServer) {
        const Served found = served_by(mine);
        expect_ok(found.status, "server");
        CHECK(found.begun == 2, "%llu begun", static_cast<unsigned long long>(found.begun));
        return;
      }
      std::vector<Element> refused(5, 1), data = input_of(rank, 1, 5);
      announce(mine, 5);
      if (rank == 1) {
        mine.refuse("five is too few");
      } else {
        const Status status = mine.run(request_of(rank, 5, refused), kPatience, nullptr);
        expect(status, Code::kInvalidArgument, {1}, "worker 0");
      }
      announce(mine, 5);
      expect_ok(mine.run(request_of(rank, 5, data), kPatience, nullptr), "second");
      CHECK(data == sum_of(kWorkers, 1, 5), "the second sum of rank %d", rank);
      announce(mine, kEnd);
    });
  }
}

TEST(a_server_ends_with_a_worker_that_is_gone) {
  for (const bool in_collective : {false, true}) {
    CommunicatorWorld world(kWorkers + 1, Fabric::kTcp);
    on_threads({0, kServer}, [&](int rank) {
      Communicator& mine = world.at(rank);
      if (rank == kServer) {
        expect(served_by(mine).status, Code::kPeerLost, {in_collective ? 1 : 0}, "server");
        return;
      }
      if (!in_collective) return world.kill(0);
      world.kill(1);
      std::vector<Element> data(5, 1);
      announce(mine, 5);
      expect(mine.run(request_of(0, 5, data), kPatience, nullptr), Code::kPeerLost, {1}, "worker");
    });
  }
}
