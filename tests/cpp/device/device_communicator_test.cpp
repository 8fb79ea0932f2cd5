// Operations launched through the driver, a fake one, on ranks that are threads: results, order of
// streams, graphs, and how ranks meet.

#include <atomic>
#include <deque>

#include "tests/cpp/device/cuda_failures.h"

namespace pycoll {
namespace {

using testing::cuda_scenario;
using testing::CudaCase;
using testing::CudaOptions;
using testing::CudaRanks;
using testing::DeviceMemory;
using testing::Scenario;

void fail_in_driver(const char* function, int error, int times) {
  testing::knob<void(const char*, int, int, int)>("pycoll_fake_fail")(function, error, 0, times);
}

std::size_t allocated_on(int ordinal) {
  return testing::knob<std::size_t(int)>("pycoll_fake_allocated")(ordinal);
}

// The first of all: what other tests leave in reserve would serve.
TEST(no_memory_at_all_is_told_on_all_ranks) {
  fail_in_driver("cuMemAlloc_v2", 2, 1000);
  CudaRanks ranks({.size = 5});
  fail_in_driver("cuMemAlloc_v2", 2, 0);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const Status& status = ranks[rank].opened;
    CHECK(
        status.code() == Code::kTransport &&
            status.message().find("bytes for channels to 4 peers on device 0: "
                                  "CUDA_ERROR_OUT_OF_MEMORY (out of memory)") != std::string::npos,
        "%s", status.message().c_str());
  }
}

TEST(every_collective_gives_the_bits_of_the_host) {
  CudaRanks ranks({.size = 3});
  CHECK(ranks[0].opened.ok(), "%s", ranks[0].opened.message().c_str());
  std::uint64_t seed = 0;
  for (const char* schedule :
       {"all_reduce/ring", "all_reduce/tree", "all_reduce/one_shot", "reduce/binomial",
        "broadcast/direct", "reduce_scatter/ring", "all_gather/bruck", "gather/direct",
        "scatter/binomial", "all_to_all/direct", "scan/chain", "exscan/recursive_doubling"}) {
    for (const std::uint64_t count : {0, 1, 700}) {
      CudaCase one(ranks, cuda_scenario(schedule, 3, count, ++seed));
      one.launch_all();
      one.check();
    }
  }
}

// Long enough for several segments and shares of Simple.
TEST(long_messages_go_in_many_segments) {
  CudaRanks ranks({.size = 2, .memory_max = 1 << 22});
  CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 120'000));
  one.launch_all();
  one.check();
}

TEST(devices_reach_each_other) {
  CudaRanks ranks({.size = 3, .ordinals = {0, 1, 1}});
  CudaCase one(ranks, cuda_scenario("all_reduce/direct", 3, 1000));
  one.launch_all();
  one.check();
}

// The driver begins launches in any order, so that the devices come to differ about whose is first.
TEST(communicators_on_the_same_devices_do_not_wait_for_each_other) {
  const CudaOptions options{.size = 2, .ordinals = {0, 1}, .timeout = Nanoseconds{5'000'000'000}};
  CudaRanks one(options);
  CudaRanks other(options);
  CudaCase first(one, cuda_scenario("all_reduce/ring", 2, 40, 1));
  CudaCase second(other, cuda_scenario("all_reduce/ring", 2, 40, 2));
  for (int round = 0; round < 20; ++round) {
    first.launch_all();
    second.launch_all();
  }
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    (void)first.output(rank), (void)second.output(rank);
    for (CudaRanks* ranks : {&one, &other}) {
      const Status failure = (*ranks)[rank].communicator->watch_thread().failure();
      CHECK(failure.ok(), "rank %u: %s", rank, failure.message().c_str());
    }
  }
}

// Each call reads what the call before wrote; no host waits in between.
TEST(operations_come_behind_each_other_and_behind_their_stream) {
  CudaRanks ranks({.size = 2});
  CudaCase first(ranks, cuda_scenario("all_reduce/ring", 2, 300, 5));
  CudaCase second(ranks, cuda_scenario("all_reduce/ring", 2, 300, 6));
  std::vector<device::StreamHandle> others(2);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const device::Gpu::Current current(*ranks[rank].gpu);
    CUDA(stream_create(&others[rank], device::kStreamNonBlocking));
  }
  for (int round = 0; round < 10; ++round) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      auto request = first.request(rank);
      Status status = ranks[rank].communicator->launch(request, 1, ranks[rank].stream);
      CHECK(status.ok(), "%s", status.message().c_str());
      // In place on the other stream: the communicator alone puts the two in order.
      request.input.data = request.output.data;
      request.descriptor.plan_key ^= 1;
      status = ranks[rank].communicator->launch(request, 1, others[rank]);
      CHECK(status.ok(), "%s", status.message().c_str());
    }
    std::vector<DeviceMemory> results;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      DeviceMemory result(300 * sizeof(std::int32_t));
      const device::Gpu::Current current(*ranks[rank].gpu);
      const auto from = reinterpret_cast<device::Address>(first.request(rank).output.data);
      CUDA(copy_to_host(result.data(), from, result.bytes(), others[rank]));
      CUDA(stream_synchronize(others[rank]));
      results.push_back(std::move(result));
    }
    CHECK(results[0] == results[1], "round %d", round);
    const DeviceMemory once =
        testing::run_on_host(cuda_scenario("all_reduce/ring", 2, 300, 5))[0].output;
    DeviceMemory twice = once;
    auto* values = reinterpret_cast<std::uint32_t*>(twice.data());
    for (int i = 0; i < 300; ++i) values[i] *= 2;
    CHECK(results[0] == twice, "round %d", round);
  }
}

TEST(an_operation_next_to_its_stream_is_joined) {
  CudaRanks ranks({.size = 2});
  for (std::uint64_t round = 0; round < 8; ++round) {
    CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 500, round));
    std::vector<std::shared_ptr<device::Mark>> done(2);
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      Status status = ranks[rank].communicator->launch_on_stream(one.request(rank), 1,
                                                                 ranks[rank].stream, &done[rank]);
      if (status.ok()) {
        status = ranks[rank].communicator->marks().join(*done[rank], ranks[rank].stream);
      }
      CHECK(status.ok(), "%s", status.message().c_str());
    }
    one.check();
    bool passed = false;
    CHECK(ranks[0].communicator->marks().check_passed(*done[0], &passed).ok() && passed,
          "it has not ended");
  }
}

// Also while streams are held up, so that the launches that free memory may not have begun. No host
// waits, not even for new plans. The end needs no more memory.
TEST(programs_free_memory_for_others) {
  CudaRanks ranks({.size = 2, .programs_max = 3});
  void* word = nullptr;
  {
    const device::Gpu::Current current(*ranks[0].gpu);
    CUDA(host_allocate(&word, sizeof(std::uint32_t), device::kHostPortableMapped));
  }
  std::atomic_ref<std::uint32_t> gate(*static_cast<std::uint32_t*>(word));
  std::size_t known = 0;
  for (std::uint32_t round = 0; round < 3; ++round) {
    std::deque<CudaCase> cases;
    for (std::uint64_t count = 1; count < 12; ++count) {
      cases.emplace_back(ranks, cuda_scenario("all_reduce/ring", 2, count, round));
    }
    if (round == 1) known = allocated_on(0);
    gate.store(round);
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const device::Gpu::Current current(*ranks[rank].gpu);
      const auto address = reinterpret_cast<device::Address>(word);
      CUDA(stream_wait_value(ranks[rank].stream, address, round + 1, 0));
    }
    fail_in_driver("cuStreamSynchronize", 1, 1000);
    for (CudaCase& one : cases) one.launch_all();
    fail_in_driver("cuStreamSynchronize", 1, 0);
    gate.store(round + 1);
    for (CudaCase& one : cases) one.check();
    CHECK(round == 0 || allocated_on(0) == known, "%zu bytes more", allocated_on(0) - known);
  }
}

// --- how ranks meet

TEST(smaller_channels_are_made_where_memory_is_short) {
  fail_in_driver("cuMemAlloc_v2", 2, 2);  // of both ranks, or twice of one
  CudaRanks ranks({.size = 2, .memory_max = 48 << 20});
  fail_in_driver("cuMemAlloc_v2", 2, 0);
  CHECK(ranks[0].opened.ok() && ranks[1].opened.ok(), "%s%s", ranks[0].opened.message().c_str(),
        ranks[1].opened.message().c_str());
  CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 3000));
  one.launch_all();
  one.check();
}

std::size_t launches_of(device::Protocol protocol) {
  return testing::knob<std::size_t(device::Protocol)>("pycoll_fake_launches")(protocol);
}

TEST(short_messages_go_in_pattern_and_long_ones_in_simple) {
  CudaRanks ranks({.size = 2, .memory_max = 1 << 22});
  for (const bool is_long : {false, true}) {
    const auto protocol = is_long ? device::Protocol::kSimple : device::Protocol::kPattern;
    const std::size_t before = launches_of(protocol);
    // 128 KiB, and one element more.
    CudaCase one(ranks, cuda_scenario("all_reduce/one_shot", 2, 32 * 1024 + (is_long ? 1 : 0)));
    one.launch_all();
    one.check();
    CHECK(launches_of(protocol) == before + 2, "%s", device::name_of(protocol));
  }
}

TEST(a_protocol_can_be_asked_for) {
  using device::Protocol;
  for (const auto protocol :
       {Protocol::kLl, Protocol::kLl128, Protocol::kSimple, Protocol::kPattern}) {
    CudaRanks ranks({.size = 2, .only = {protocol, protocol}});
    const std::size_t before = launches_of(protocol);
    CHECK(ranks[0].opened.ok(), "%s", ranks[0].opened.message().c_str());
    Scenario empty = cuda_scenario("all_reduce/ring", 2, 600);
    empty.is_empty = true;
    for (const Scenario& scenario : {cuda_scenario("all_reduce/one_shot", 2, 600), empty}) {
      CudaCase one(ranks, scenario);
      one.launch_all();
      one.check();
    }
    CHECK(launches_of(protocol) == before + 4, "%s", device::name_of(protocol));
  }
}

// --- what goes wrong

TEST(ranks_that_were_told_to_use_different_protocols_do_not_wait_for_each_other) {
  CudaRanks ranks({.size = 3, .only = {device::Protocol::kLl, device::Protocol::kLl, {}}});
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const Status& status = ranks[rank].opened;
    CHECK(status.code() == Code::kMismatch && status.ranks() == std::vector<int>{2} &&
              status.message() ==
                  "PYCOLL_DEVICE_PROTOCOL is ll on rank 0 (host:0) and auto on rank 2 (host:2): "
                  "set it alike on all ranks",
          "%s", status.message().c_str());
  }
}

TEST(a_rank_that_does_not_come_is_named) {
  CudaRanks ranks({.size = 3, .timeout = Nanoseconds{300'000'000}});
  CudaCase one(ranks, cuda_scenario("all_reduce/one_shot", 3, 50));
  for (const std::uint32_t rank : {0, 1}) {
    CHECK(one.launch(rank).ok(), "rank %u", rank);
  }
  for (const std::uint32_t rank : {0, 1}) {
    (void)one.output(rank);
    Status status;
    for (int i = 0; i < 500 && status.ok(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      status = ranks[rank].communicator->watch_thread().failure();
    }
    CHECK(status.code() == Code::kTimeout && status.ranks() == std::vector<int>{2} &&
              status.message() ==
                  "device all_reduce of 50 int32, op sum: not done after 0.3 s; "
                  "the device still waited for ranks 2",
          "%s", status.message().c_str());
    CHECK(one.launch(rank).code() == Code::kTimeout, "it goes on");
  }
}

// Its kernels end before it is known why.
TEST(what_failed_never_counts_as_done) {
  CudaRanks ranks({.size = 2, .timeout = Nanoseconds{100'000'000}});
  CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 50));
  device::Communicator& mine = *ranks[0].communicator;
  std::shared_ptr<device::Mark> mark;
  Status status = mine.launch_on_stream(one.request(0), one.lanes(), ranks[0].stream, &mark);
  CHECK(status.ok(), "%s", status.message().c_str());
  for (bool is_past = false; !is_past;) {
    status = mine.marks().check_passed(*mark, &is_past);
    CHECK(is_past || status.ok(), "%s", status.message().c_str());
    std::this_thread::yield();
  }
  CHECK(status.code() == Code::kTimeout, "%s", status.message().c_str());
}

TEST(ranks_that_disagree_are_told) {
  CudaRanks ranks({.size = 2, .timeout = Nanoseconds{1'000'000'000}});
  testing::check_disagreement_is_told(ranks);
}

TEST(streams_that_cannot_be_used_are_refused) {
  CudaRanks ranks({.size = 2});
  CudaCase one(ranks, cuda_scenario("all_reduce/ring", 2, 5));
  const auto text = [&](std::uint32_t rank, device::StreamHandle stream) {
    return ranks[rank].communicator->launch(one.request(rank), 1, stream).message();
  };
  one.launch_all();
  std::string found = text(1, ranks[0].stream);
  CHECK(found ==
            "ranks 1 and 0 use the same stream, where one would wait for the other for ever: "
            "give each thread a stream of its own",
        "%s", found.c_str());
  found = text(0, nullptr);
  CHECK(found ==
            "ranks 0 and 1 are threads on one device, and this call's stream is the default "
            "one, which never runs at the same time as other streams: give each thread a stream "
            "of its own",
        "%s", found.c_str());
  const auto other = testing::open_gpu(1);
  device::StreamHandle foreign = nullptr;
  {
    const device::Gpu::Current current(*other);
    CUDA(stream_create(&foreign, device::kStreamNonBlocking));
  }
  found = text(0, foreign);
  CHECK(found ==
            "stream is of another device than this rank's, which is device 0: pass a stream of "
            "that device",
        "%s", found.c_str());
  one.check();
}

TEST(memory_is_looked_at) {
  device::Address there = 0;
  void* host = nullptr;
  {
    const device::Gpu::Current current(*testing::open_gpu(1));
    CUDA(memory_allocate(&there, 100));
    CUDA(host_allocate(&host, 100, device::kHostPortableMapped));
  }
  int ordinal = -1;
  const auto text = [&](const void* address) {
    return device::locate(testing::fake_driver(), address, "x", &ordinal).message();
  };
  std::string found = text(reinterpret_cast<const void*>(there));
  CHECK(found.empty() && ordinal == 1, "%s, device %d", found.c_str(), ordinal);
  found = text(host);
  CHECK(found ==
            "x is host memory behind a device array's interface: pass it as an array of the "
            "host",
        "%s", found.c_str());
  {
    const device::Gpu::Current current(*testing::open_gpu(1));
    CUDA(memory_free(there));
  }
  found = text(reinterpret_cast<const void*>(there));
  CHECK(found == "x is memory that the CUDA driver does not know: was it freed?", "%s",
        found.c_str());
}

TEST(devices_that_are_not_there_are_refused) {
  std::shared_ptr<const device::Gpu> gpu;
  Status status = device::Gpu::open(testing::fake_driver(), testing::fake_image(), 2, &gpu);
  CHECK(status.message() == "device is 2: this process sees 2 devices", "%s",
        status.message().c_str());
  status = device::Gpu::open(testing::fake_driver(), {}, 3, &gpu);
  CHECK(status.message().find("this build of pycoll has no CUDA kernels") == 0, "%s",
        status.message().c_str());
  static device::Driver old = testing::fake_driver();
  old.driver_version = [](int* version) { return *version = 12040, 0; };
  status = device::Gpu::open(old, testing::fake_image(), 0, &gpu);
  CHECK(status.message() ==
            "the NVIDIA driver knows CUDA 12.4, pycoll's kernels need 13.0: update "
            "the driver",
        "%s", status.message().c_str());
}

TEST(copies_join_axes_that_lie_together) {
  using device::Copy;
  Copy copy{};
  std::byte memory[16];
  const device::Strided joined{memory, {2, 1, 3, 4}, {192, 5, 64, 16}};
  Status status = device::make_copy(Copy::Kind::kPack, joined, memory, 8, &copy);
  CHECK(status.ok() && copy.count == 24 && copy.axes == 1, "%u axes", copy.axes);
  CHECK(copy.lengths[0] == 24 && copy.strides[0] == 16, "not joined");
  device::Strided apart;
  for (int axis = 0; axis < 33; ++axis) {
    apart.lengths.push_back(2);
    apart.strides.push_back(1);
  }
  status = device::make_copy(Copy::Kind::kPack, apart, memory, 1, &copy);
  CHECK(
      status.code() == Code::kInvalidArgument &&
          status.message().find("more than 32 axes that do not lie together") != std::string::npos,
      "%s", status.message().c_str());
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
