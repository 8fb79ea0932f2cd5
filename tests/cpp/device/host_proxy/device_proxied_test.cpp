// Channels that the host proxies, and those over peer memory: on several devices of the fake
// driver, ranks as threads, with wires over shared memory and over tcp.

#include <array>
#include <chrono>

#include "base/prng.h"
#include "device/channels/post.h"
#include "device/channels/reach.h"
#include "tests/cpp/device/cuda_failures.h"

namespace pycoll {
namespace {

using testing::check_open;
using testing::cuda_scenario;
using testing::CudaCase;
using testing::CudaOptions;
using testing::CudaRanks;
using testing::failure_of;
using testing::Scenario;

// Two machines, two devices each: every plan has both kinds of ports.
CudaOptions two_machines(bool over_tcp) {
  CudaOptions options;
  options.size = 4;
  options.ordinals = {0, 1, 0, 1};
  options.machines = {1, 1, 2, 2};
  options.over_tcp = over_tcp;
  return options;
}

void corrupt_in_driver(bool corrupts) {
  testing::knob<void(bool)>("pycoll_fake_corrupt")(corrupts);
}

TEST(every_schedule_gives_the_bits_of_the_host_across_machines) {
  CudaRanks ranks(two_machines(false));
  check_open(ranks);
  Prng prng(5);
  std::uint64_t seed = 0;
  for (const testing::Schedule& schedule : testing::schedules()) {
    if (schedule.size != 4) continue;
    const std::uint64_t counts[] = {0, 1, 1 + prng.below(40), 1 + prng.below(1500)};
    CudaCase one(ranks, cuda_scenario(schedule.name, 4, counts[prng.below(4)], ++seed));
    one.launch_all();
    one.check();
  }
}

TEST(long_messages_cross_in_many_segments) {
  for (const bool over_tcp : {false, true}) {
    CudaRanks ranks(two_machines(over_tcp));
    check_open(ranks);
    for (const char* schedule : {"all_reduce/hierarchical", "all_reduce/ring"}) {
      CudaCase one(ranks, cuda_scenario(schedule, 4, 60'000));
      one.launch_all();
      one.check();
    }
  }
}

// Nobody waits in between, so that hosts are far ahead of devices.
TEST(operations_come_behind_each_other_across_machines) {
  CudaRanks ranks({.size = 3, .machines = {1, 2, 3}, .over_tcp = true});
  check_open(ranks);
  std::vector<std::unique_ptr<CudaCase>> cases;
  for (std::uint64_t round = 0; round < 12; ++round) {
    const char* schedules[] = {"all_reduce/ring", "broadcast/direct", "all_to_all/direct"};
    cases.push_back(std::make_unique<CudaCase>(
        ranks, cuda_scenario(schedules[round % 3], 3, 1 + 100 * round, round)));
    cases.back()->launch_all();
  }
  for (const auto& one : cases) one->check();
}

TEST(a_rank_may_leave_when_its_own_part_is_done) {
  CudaRanks ranks({.size = 2, .machines = {1, 2}});
  check_open(ranks);
  // More than fits between the two.
  CudaCase one(ranks, cuda_scenario("broadcast/direct", 2, 5000));
  CHECK(one.launch(0).ok() && one.launch(1).ok(), "launch");
  const std::uint32_t root = testing::find_schedule("broadcast/direct", 2).root;
  ranks[root].communicator->close();
  one.check();
}

// --- what goes wrong

TEST(a_rank_of_another_machine_that_does_not_come_is_named) {
  CudaOptions options = two_machines(false);
  options.timeout = Nanoseconds{300'000'000};
  CudaRanks ranks(options);
  check_open(ranks);
  CudaCase one(ranks, cuda_scenario("all_reduce/one_shot", 4, 50));
  for (const std::uint32_t rank : {0, 1, 2}) CHECK(one.launch(rank).ok(), "rank %u", rank);
  for (const std::uint32_t rank : {0, 1, 2}) {
    const Status status = failure_of(ranks[rank]);
    CHECK(status.code() == Code::kTimeout && status.ranks() == std::vector<int>{3}, "rank %u: %s",
          rank, status.message().c_str());
    (void)one.output(rank);
  }
}

TEST(ranks_of_two_machines_that_disagree_are_told) {
  CudaRanks ranks({.size = 2, .timeout = Nanoseconds{2'000'000'000}, .machines = {1, 2}});
  check_open(ranks);
  testing::check_disagreement_is_told(ranks);
}

TEST(a_way_that_breaks_loses_the_peer) {
  CudaRanks ranks({.size = 2, .machines = {1, 2}, .over_tcp = true});
  check_open(ranks);
  CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 50));
  CHECK(one.launch(0).ok(), "rank 0");
  ranks.wires().cut(1);
  const Status status = failure_of(ranks[0]);
  CHECK(status.code() == Code::kPeerLost && status.ranks() == std::vector<int>{1} &&
            status.message().find(
                "rank 1 (host:1) was lost during device all_reduce of 50 int32") == 0,
        "%s", status.message().c_str());
  (void)one.output(0);
}

// --- peer access that lies

TEST(devices_that_corrupt_what_they_write_to_each_other_are_proxied) {
  corrupt_in_driver(true);
  {
    CudaRanks ranks({.size = 3, .ordinals = {0, 1, 0}});
    check_open(ranks);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      const std::vector<std::string>& lines = ranks[rank].communicator->warnings();
      CHECK(lines.size() == 1 &&
                lines[0] ==
                    "device 0 (Fake 0) of rank 0 (host:0) and device 1 (Fake 1) of rank 1 (host:1) "
                    "do not read what the other one writes, though the driver offers peer access: "
                    "most likely an IOMMU or ACS redirects it (turn both off, or pass the IOMMU "
                    "through); the host carries what they send to each other, more slowly; and 1 "
                    "pairs more",
            "%zu lines: %s", lines.size(), lines.empty() ? "" : lines[0].c_str());
    }
    for (const char* schedule : {"all_reduce/direct", "all_gather/ring"}) {
      CudaCase one(ranks, cuda_scenario(schedule, 3, 900));
      one.launch_all();
      one.check();
    }
  }
  corrupt_in_driver(false);
}

TEST(devices_that_do_not_corrupt_are_not_warned_of) {
  CudaRanks ranks({.size = 2, .ordinals = {0, 1}});
  check_open(ranks);
  CHECK(ranks[0].communicator->warnings().empty(), "%s",
        ranks[0].communicator->warnings()[0].c_str());
}

// --- what ranks tell each other

TEST(findings_are_told_whole) {
  using device::Finding;
  const std::vector<std::vector<Finding>> all{
      {{Finding::Way::kReached, ""}, {Finding::Way::kRefused, "are refused"}},
      {{Finding::Way::kReached, ""}, {Finding::Way::kReached, ""}}};
  device::Findings read;
  Status status = device::from_told({device::to_told(all[0]), device::to_told(all[1])}, &read);
  CHECK(status.ok() && read.size() == 2, "%s", status.message().c_str());
  CHECK(!device::is_reached(read, 0, 1) && !device::is_reached(read, 1, 0), "one end refuses");
  CHECK(device::is_reached(read, 0, 0) && device::is_any_proxied(read), "proxied");
  const auto lines = device::warnings_of(read, {"a", "b"});
  CHECK(lines.size() == 1 && lines[0] == "a and b are refused", "%zu lines", lines.size());
  for (const std::string& text : {std::string("x\0y\0", 4), std::string("yy"), std::string()}) {
    status = device::from_told({device::to_told(all[0]), text}, &read);
    CHECK(status.code() == Code::kTransport, "%s", text.c_str());
  }
}

TEST(descriptors_come_by_post_with_the_right_token_only) {
  std::array<std::unique_ptr<device::Post>, 3> posts;
  for (auto& one : posts) CHECK(device::Post::open(&one).ok(), "no socket");
  const UniqueFd mine = testing::copy_of(0);
  std::vector<UniqueFd> theirs(3);
  // It knows the name of rank 0's post, and claims to be rank 1.
  device::PostAddress guessed = posts[0]->address();
  guessed.token[3] ^= 1;
  posts[2]->exchange(1, mine, {{0, guessed}}, 1'000'000, &theirs);
  posts[0]->exchange(0, mine, {{1, posts[1]->address()}}, 10'000'000, &theirs);
  CHECK(!theirs[1].valid(), "a descriptor of nobody");
  posts[1]->exchange(1, mine, {{0, posts[0]->address()}}, 1'000'000'000, &theirs);
  CHECK(theirs[0].valid(), "nothing of rank 0");
  std::vector<UniqueFd> late(3);
  posts[0]->exchange(0, mine, {{1, posts[1]->address()}}, 1'000'000'000, &late);
  CHECK(late[1].valid(), "nothing of rank 1");
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
