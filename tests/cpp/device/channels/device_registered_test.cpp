// Arrays that ranks register with each other, through the fake driver: what is mapped and what is
// not, and that results are written there directly.

#include <functional>

#include "device/memory/shared_memory.h"
#include "tests/cpp/device/cuda_ranks.h"

namespace pycoll {
namespace {

using device::kNotRegistered;
using testing::cuda_scenario;
using testing::CudaCase;
using testing::CudaRanks;
using testing::Scenario;
using testing::Table;
using Array = device::Registry::Array;
using Entered = device::Registry::Entered;

// Of float32, for which operations run in Simple; parts begin at multiples of 16 bytes.
constexpr std::uint64_t kCount = 36'000;

std::uint64_t loads() { return testing::knob<std::uint64_t()>("pycoll_fake_loads")(); }

// Every rank registers its array, of a rank's case or of anything else.
std::vector<Entered> enter_all(CudaRanks& ranks,
                               const std::function<Array(std::uint32_t)>& array_of) {
  Table table(ranks.size());
  std::vector<Entered> all(ranks.size());
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<Entered> mine;
      const Status status =
          ranks[rank].communicator->arrays().enter(table.of(rank), {array_of(rank)}, &mine);
      CHECK(status.ok() && mine.size() == 1, "%s", status.message().c_str());
      all[rank] = mine[0];
    });
  }
  for (std::thread& one : threads) one.join();
  return all;
}

Array output_of(CudaCase& one, std::uint32_t rank) {
  const auto request = one.request(rank);
  return {reinterpret_cast<device::Address>(request.output.data), request.output.bytes};
}

std::uint64_t loads_of(CudaCase& one) {
  const std::uint64_t before = loads();
  one.launch_all();
  one.check();
  return loads() - before;
}

TEST(results_are_written_directly_on_the_same_device_and_on_others) {
  for (const std::vector<int>& ordinals : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 1, 1}}) {
    CudaRanks ranks({.size = 3, .ordinals = ordinals});
    CudaCase one(ranks, cuda_scenario("all_reduce/direct", 3, kCount));
    const std::uint64_t copied = loads_of(one);
    const auto entered = enter_all(ranks, [&](std::uint32_t rank) { return output_of(one, rank); });
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      CHECK(entered[rank].number == 0 && entered[rank].is_reached, "rank %u", rank);
    }
    // Nobody loads what the two others have reduced.
    const std::uint64_t packs = kCount * sizeof(float) / 16;
    CHECK(copied - loads_of(one) == 3 * packs / 3 * 2, "no direct write");
    // Rank 1 knows the number no more, as receiver and as sender; the other two do.
    CHECK(ranks[1].communicator->arrays().lapse(0).ok(), "lapse");
    CHECK(copied - loads_of(one) == 2 * packs / 3, "what lapsed is written to");
    CHECK(ranks[1].communicator->arrays().let_go() == std::vector<std::uint32_t>{0}, "it is kept");
    CHECK(ranks[1].communicator->arrays().let_go().empty(), "it is let go twice");
  }
}

// By its number at the driver: the address may be the same.
TEST(memory_that_came_anew_is_not_what_was_registered) {
  CudaRanks ranks({.size = 2});
  constexpr std::size_t kBytes = 1 << 20;
  std::vector<device::Address> memory(2);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const device::Gpu::Current current(*ranks[rank].gpu);
    CUDA(memory_allocate(&memory[rank], kBytes));
  }
  const auto entered =
      enter_all(ranks, [&](std::uint32_t rank) { return Array{memory[rank], kBytes}; });
  CHECK(entered[0].is_reached && entered[1].is_reached, "not registered");
  const device::Gpu::Current current(*ranks[0].gpu);
  const auto* address = reinterpret_cast<const std::byte*>(memory[0]);
  const device::Registry& registry = ranks[0].communicator->arrays().registry();
  CHECK(registry.find(address, kBytes) == 0 && registry.find(address + 64, 64) == 0, "lost");
  CHECK(registry.find(address + 64, kBytes) == kNotRegistered, "beyond the end");
  CHECK(registry.find(address - 16, 32) == kNotRegistered, "in front");
  CUDA(memory_free(memory[0]));
  device::Address again = 0;
  CUDA(memory_allocate(&again, kBytes));
  CHECK(again == memory[0], "the driver of the tests gives another address");
  CHECK(registry.find(address, kBytes) == kNotRegistered, "taken for what was freed");
  CUDA(memory_free(again));
  CUDA(memory_free(memory[1]));
}

// Of cuMemCreate: whole, and as a piece of what grows in place, behind which another one lies.
TEST(memory_with_addresses_of_its_own_is_registered_if_it_is_one_piece) {
  constexpr std::size_t kPiece = std::size_t{2} << 20;
  for (const int other : {0, 1}) {
    CudaRanks ranks({.size = 2, .ordinals = {0, other}});
    std::vector<device::Address> memory(2);
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const device::Gpu::Current current(*ranks[rank].gpu);
      CUDA(address_reserve(&memory[rank], 2 * kPiece, kPiece, 0, 0));
      device::AllocationProperties properties;
      properties.location.ordinal = ranks[rank].gpu->ordinal();
      const device::MemoryAccess access{{1, ranks[rank].gpu->ordinal()}};
      for (const std::size_t offset : {std::size_t{0}, kPiece}) {
        device::AllocationHandle handle = 0;
        CUDA(allocation_create(&handle, kPiece, &properties, 0));
        CUDA(memory_map(memory[rank] + offset, kPiece, 0, handle, 0));
        CUDA(memory_access(memory[rank] + offset, kPiece, &access, 1));
        CUDA(allocation_release(handle));
      }
    }
    const auto reached = [&](std::size_t offset, std::size_t bytes) {
      const auto entered =
          enter_all(ranks, [&](std::uint32_t rank) { return Array{memory[rank] + offset, bytes}; });
      CHECK(entered[0].is_reached == entered[1].is_reached, "only one way");
      return entered[0].is_reached;
    };
    // Another device of the process has no access to it.
    CHECK(reached(kPiece + 512, 4096) == (other == 0), "one piece");
    CHECK(!reached(kPiece - 512, 4096), "two pieces");
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ranks[rank].communicator->close();
      const device::Gpu::Current current(*ranks[rank].gpu);
      for (const std::size_t offset : {std::size_t{0}, kPiece}) {
        CUDA(memory_unmap(memory[rank] + offset, kPiece));
      }
      CUDA(address_free(memory[rank], 2 * kPiece));
    }
  }
}

TEST(peers_out_of_reach_and_rest_of_the_ranks) {
  CudaRanks ranks({.size = 3, .machines = {1, 1, 2}});
  CudaCase one(ranks, cuda_scenario("all_reduce/direct", 3, kCount));
  const auto entered = enter_all(ranks, [&](std::uint32_t rank) { return output_of(one, rank); });
  CHECK(entered[0].is_reached && entered[1].is_reached && !entered[2].is_reached, "who is reached");
  one.launch_all();
  one.check();
}

TEST(as_many_arrays_on_all_ranks) {
  CudaRanks ranks({.size = 2});
  Table table(2);
  std::vector<Status> told(2);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<Entered> entered;
      told[rank] = ranks[rank].communicator->arrays().enter(table.of(rank),
                                                            std::vector<Array>(rank + 1), &entered);
    });
  }
  for (std::thread& one : threads) one.join();
  CHECK(told[0].code() == Code::kInvalidArgument && told[1].code() == Code::kInvalidArgument,
        "no error");
  CHECK(told[0].message() ==
            "register: rank 1 (host:1) passed 2 arrays on devices, this rank 1: all ranks register "
            "as many",
        "%s", told[0].message().c_str());
  // Nothing was entered, and what comes next works.
  CudaCase one(ranks, cuda_scenario("all_reduce/direct", 2, kCount));
  const auto entered = enter_all(ranks, [&](std::uint32_t rank) { return output_of(one, rank); });
  CHECK(entered[0].number == 0 && entered[0].is_reached, "after an error");
  one.launch_all();
  one.check();
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
