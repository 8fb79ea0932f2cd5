// Channels between machines whose slots lie in device memory: cards of the fake provider of verbs
// read and write memory of the fake driver's devices, whose cards' writes come late.
#include <chrono>

#include "tests/cpp/device/cuda_failures.h"
#include "tests/cpp/device/cuda_network.h"

namespace pycoll {
namespace {

using testing::Cards;
using testing::check_open;
using testing::cuda_scenario;
using testing::CudaCase;
using testing::CudaOptions;
using testing::CudaRanks;
using testing::failure_of;
using testing::Network;

// So many ranks, each on a machine of its own.
CudaOptions apart(Network& network, std::uint32_t size = 2) {
  CudaOptions options;
  options.size = size;
  for (std::uint32_t rank = 0; rank < size; ++rank) {
    options.machines.push_back(rank);
    options.ordinals.push_back(static_cast<int>(rank % 2));
  }
  options.wires = network.wires();
  return options;
}

void check_one(CudaRanks& ranks, const char* schedule, std::uint64_t count, std::uint64_t seed) {
  CudaCase one(ranks,
               cuda_scenario(schedule, static_cast<std::uint32_t>(ranks.size()), count, seed));
  one.launch_all();
  one.check();
}

TEST(payloads_go_from_device_to_device_and_no_host_copies_them) {
  for (const int rails : {1, 2}) {
    Network network({}, rails);
    CudaOptions options = apart(network, 4);
    options.machines = {1, 1, 2, 2};
    options.ordinals = {0, 1, 0, 1};
    CudaRanks ranks(options);
    check_open(ranks);
    CHECK(ranks[0].communicator->warnings().empty(), "%s",
          ranks[0].communicator->warnings()[0].c_str());
    const char* schedules[] = {"all_reduce/hierarchical", "all_gather/ring", "all_to_all/direct",
                               "broadcast/direct"};
    std::uint64_t seed = 0;
    for (const char* schedule : schedules) {
      for (const std::uint64_t count : {0, 3, 700}) check_one(ranks, schedule, count, ++seed);
    }
    check_one(ranks, "all_reduce/ring", 20'000, ++seed);
    const std::uint64_t written = network.fake.directly_written_bytes();
    CHECK(network.fake.hosts_bytes() == 0, "payloads left memory of hosts");
    CHECK(written > 100'000 && written == network.fake.taken_bytes(), "%llu written, %llu read",
          static_cast<unsigned long long>(written),
          static_cast<unsigned long long>(network.fake.taken_bytes()));
  }
}

// Nobody waits in between, and slots are used again and again.
TEST(operations_come_behind_each_other) {
  Network network;
  CudaRanks ranks(apart(network, 3));
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

// Wrong results of some operations, if cards are as these once devices have met.
int wrong_of(const Cards& cards) {
  Network network({.keeps = cards.keeps});
  CudaRanks ranks(apart(network));
  check_open(ranks);
  testing::set_cards(cards);
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 900, seed));
    one.launch_all();
    wrong += one.first_wrong() != ranks.size() ? 1 : 0;
  }
  return wrong;
}

TEST(without_the_flush_kernels_read_what_was_there_before) {
  const int wrong = wrong_of({.forgets = true});
  CHECK(wrong >= 5, "only %d of 6 operations are wrong", wrong);
  CHECK(wrong_of({}) == 0, "wrong, though flushed");
  CHECK(wrong_of({.keeps = true, .forgets = true}) == 0, "wrong, though the device keeps order");
}

// --- what cannot be is staged, and told

struct Staged {
  Cards cards{};
  std::string words{};   // of the warning; empty: there is none
  bool sends = false;    // from device memory
  bool arrives = false;  // there
  const char* fails{};   // a function of the driver, once
  int error = 0;
  bool old_library = false;
  bool direct = true;
};

void check_staged(const Staged& one) {
  Network network(one.cards, 1, one.old_library);
  if (one.fails != nullptr) testing::fail_in_driver(one.fails, one.error);
  CudaOptions options = apart(network);
  options.direct = one.direct;
  CudaRanks ranks(options);
  check_open(ranks);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<std::string>& lines = ranks[rank].communicator->warnings();
    CHECK(lines.size() == (one.words.empty() ? 0 : 1), "rank %zu: %zu lines", rank, lines.size());
    CHECK(lines.empty() || lines[0].find(one.words) != std::string::npos, "%s", lines[0].c_str());
  }
  for (const std::uint64_t count : {0, 5, 3000}) {
    check_one(ranks, "all_reduce/ring", count, count + 1);
    check_one(ranks, "all_gather/ring", count, count + 2);
  }
  CHECK((network.fake.taken_bytes() != 0) == one.sends, "sent from devices: %d", !one.sends);
  CHECK((network.fake.directly_written_bytes() != 0) == one.arrives, "arrived on devices: %d",
        !one.arrives);
}

TEST(where_the_driver_exports_nothing_the_host_copies) {
  check_staged({.cards = {.dma_buf = false},
                .words = "device 0 (Fake 0) of rank 0 (host:0) is not reached by network cards "
                         "(GPUDirect RDMA): the CUDA driver exports no dma-buf of its memory (that "
                         "takes the open kernel modules); without one it takes nvidia-peermem: "
                         "verbs: fake0 port 1: cannot register"});
  check_staged({.cards = {.dma_buf = false, .addresses = true}, .sends = true, .arrives = true});
}

TEST(where_an_export_fails_the_host_of_that_rank_copies) {
  check_staged({.words = "as a dma-buf: CUDA_ERROR_NOT_SUPPORTED",
                .sends = true,  // from the other rank
                .arrives = true,
                .fails = "cuMemGetHandleForAddressRange",
                .error = 801});
}

TEST(where_writes_have_no_order_nothing_arrives_on_devices) {
  check_staged({.cards = {.flushes = false},
                .words =
                    "is not written by network cards (GPUDirect RDMA): the CUDA driver neither "
                    "keeps their writes in order nor lets the host flush them",
                .sends = true});
  check_staged({.cards = {.keeps = true, .flushes = false}, .sends = true, .arrives = true});
}

// What was tried with a pattern went both ways, and nothing else does.
TEST(cards_that_do_not_tell_the_truth_are_not_used) {
  for (const Cards& cards : {Cards{.corrupts = true}, Cards{.forgets = true}}) {
    Network network(cards);
    CudaRanks ranks(apart(network, 3));
    check_open(ranks);
    const std::uint64_t written = network.fake.directly_written_bytes();
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const std::vector<std::string>& lines = ranks[rank].communicator->warnings();
      CHECK(lines.size() == 1 &&
                lines[0].find("network cards deliver other bytes than were sent: most likely an "
                              "IOMMU or ACS redirects them") != std::string::npos,
            "rank %zu: %s", rank, lines.empty() ? "nothing" : lines[0].c_str());
    }
    for (const char* schedule : {"all_reduce/ring", "all_to_all/direct"}) {
      check_one(ranks, schedule, 2000, 4);
    }
    CHECK(network.fake.directly_written_bytes() == written && written != 0, "cards write");
  }
}

TEST(where_the_first_flush_fails_cards_are_not_used) {
  check_staged({.words = "(GPUDirect RDMA): the CUDA driver cannot flush what network cards wrote",
                .sends = true,  // what was tried
                .arrives = true,
                .fails = "cuFlushGPUDirectRDMAWrites",
                .error = 801});
}

TEST(cards_that_bring_nothing_are_not_used) {
  Network network;
  CudaOptions options = apart(network);
  options.wires = [&network, make = network.wires()](std::size_t size) {
    auto made = make(size);
    if (network.first_device == 0) network.fake.cut(1);  // only the first ones
    network.first_device = 8;
    return made;
  };
  CudaRanks ranks(options);
  check_open(ranks);
  const std::vector<std::string>& lines = ranks[0].communicator->warnings();
  CHECK(lines.size() == 1 &&
            lines[0].find("is not served by network cards (GPUDirect RDMA): ") != std::string::npos,
        "%s", lines.empty() ? "nothing" : lines[0].c_str());
  check_one(ranks, "all_reduce/ring", 700, 1);
}

TEST(where_the_library_is_old_the_host_copies) {
  check_staged({.words = "libibverbs.so.1 has no ibv_reg_dmabuf_mr", .old_library = true});
}

TEST(where_the_user_wants_it_the_host_copies_and_nothing_is_said) {
  check_staged({.direct = false});
}

TEST(a_rank_whose_card_refuses_is_staged_alone) {
  Network network;
  network.fake.refuse_dmabufs(1);
  CudaRanks ranks(apart(network, 3));
  check_open(ranks);
  const std::vector<std::string>& lines = ranks[0].communicator->warnings();
  CHECK(lines.size() == 1 &&
            lines[0].find("of rank 1 (host:1) is not reached") != std::string::npos &&
            lines[0].find("fake1 port 1: cannot register") != std::string::npos &&
            lines[0].find("more") == std::string::npos,
        "%zu lines: %s", lines.size(), lines.empty() ? "" : lines[0].c_str());
  for (const char* schedule : {"all_reduce/ring", "all_to_all/direct"}) {
    check_one(ranks, schedule, 2000, 4);
  }
  CHECK(network.fake.taken_bytes() != 0 && network.fake.directly_written_bytes() != 0,
        "all are staged");
}

TEST(memory_that_may_not_be_locked_is_staged) {
  Network network({.dma_buf = false, .addresses = true});
  CudaOptions options = apart(network);
  // When the transports are there.
  options.wires = [&network, make = network.wires()](std::size_t size) {
    auto made = make(size);
    network.fake.refuse_memory(ENOMEM);
    return made;
  };
  CudaRanks ranks(options);
  check_open(ranks);
  const std::vector<std::string>& lines = ranks[1].communicator->warnings();
  CHECK(lines.size() == 1 && lines[0].find("Cannot allocate memory") != std::string::npos &&
            lines[0].find("; and 1 ranks more") != std::string::npos,
        "%zu lines: %s", lines.size(), lines.empty() ? "" : lines[0].c_str());
  check_one(ranks, "all_reduce/ring", 500, 1);
  CHECK(network.fake.directly_written_bytes() == 0 && network.fake.taken_bytes() == 0,
        "not staged");
}

// --- what goes wrong later is as on every other way

TEST(a_rank_may_leave_when_its_own_part_is_done) {
  Network network;
  CudaRanks ranks(apart(network));
  check_open(ranks);
  // More than fits between the two.
  CudaCase one(ranks, cuda_scenario("broadcast/direct", 2, 5000));
  CHECK(one.launch(0).ok() && one.launch(1).ok(), "launch");
  ranks[testing::find_schedule("broadcast/direct", 2).root].communicator->close();
  one.check();
}

TEST(a_rank_that_does_not_come_is_named) {
  Network network;
  CudaOptions options = apart(network, 3);
  options.timeout = Nanoseconds{300'000'000};
  CudaRanks ranks(options);
  check_open(ranks);
  CudaCase one(ranks, cuda_scenario("all_reduce/one_shot", 3, 50));
  for (const std::uint32_t rank : {0, 1}) CHECK(one.launch(rank).ok(), "rank %u", rank);
  for (const std::uint32_t rank : {0, 1}) {
    const Status status = failure_of(ranks[rank]);
    CHECK(status.code() == Code::kTimeout && status.ranks() == std::vector<int>{2}, "rank %u: %s",
          rank, status.message().c_str());
    (void)one.output(rank);
  }
}

TEST(ranks_that_disagree_are_told) {
  Network network;
  CudaOptions options = apart(network);
  options.timeout = Nanoseconds{2'000'000'000};
  CudaRanks ranks(options);
  check_open(ranks);
  testing::check_disagreement_is_told(ranks);
}

TEST(a_way_that_breaks_loses_the_peer) {
  Network network;
  CudaRanks ranks(apart(network));
  check_open(ranks);
  CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 50));
  CHECK(one.launch(0).ok(), "rank 0");
  network.kill(1);
  const Status status = failure_of(ranks[0]);
  CHECK(status.code() == Code::kPeerLost && status.ranks() == std::vector<int>{1}, "%s",
        status.message().c_str());
  (void)one.output(0);
}

TEST(a_device_that_cannot_flush_after_all_loses_the_peer) {
  Network network;
  CudaRanks ranks(apart(network));
  check_open(ranks);
  testing::fail_in_driver("cuFlushGPUDirectRDMAWrites", 1);
  CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 50));
  one.launch_all();
  std::size_t told = 0;
  Status status;
  for (int i = 0; i < 2000 && status.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    told = static_cast<std::size_t>(i % 2);
    status = ranks[told].communicator->watch_thread().failure();
  }
  CHECK(status.code() == Code::kPeerLost &&
            status.message().find("cannot flush what network cards wrote: CUDA_ERROR_INVALID_") !=
                std::string::npos,
        "%s", status.message().c_str());
  // Its host would tell the other one; here it need not wait for its deadline.
  ranks[1 - told].communicator->watch_thread().set_timeout(1);
  CHECK(failure_of(ranks[1 - told]).code() == Code::kTimeout, "the other one");
  for (std::uint32_t rank = 0; rank < 2; ++rank) (void)one.output(rank);
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
