// Ranks that are threads of this process on the fake driver's devices, and arrays in their memory.
#pragma once

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <barrier>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/device_communicator.h"
#include "tests/cpp/device/kernels/device_world.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/socket_pairs.h"
#include "tests/cpp/transport/shm/shm_fixture.h"
#include "transport/tcp/tcp.h"

namespace pycoll::testing {

inline const device::Driver& fake_driver() {
  static const device::Driver opened = [] {
    device::Driver driver{};
    std::string why;
    CHECK(device::open_driver(PYCOLL_FAKE_CUDA, &driver, &why), "%s", why.c_str());
    return driver;
  }();
  return opened;
}

#define CUDA(call)                                         \
  do {                                                     \
    const int error = pycoll::testing::fake_driver().call; \
    CHECK(error == 0, "%s gives %d", #call, error);        \
  } while (false)

// What tests ask of the fake; cuda_fake_api.cpp.
inline void* fake_cuda() {
  static void* const opened = dlopen(PYCOLL_FAKE_CUDA, RTLD_NOW);
  CHECK(opened != nullptr, "no %s", PYCOLL_FAKE_CUDA);
  return opened;
}

template <typename Function>
Function* knob(const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(fake_cuda(), name));
  CHECK(found != nullptr, "no %s", name);
  return found;
}

// What the fake takes for a module.
inline std::span<const std::byte> fake_image() {
  static const std::byte image[16]{};
  return image;
}

inline std::shared_ptr<const device::Gpu> open_gpu(int ordinal) {
  std::shared_ptr<const device::Gpu> gpu;
  const Status status = device::Gpu::open(fake_driver(), fake_image(), ordinal, &gpu);
  CHECK(status.ok(), "%s", status.message().c_str());
  return gpu;
}

// An exchange between threads.
class Table {
 public:
  explicit Table(std::size_t size) : told_(size), barrier_(static_cast<std::ptrdiff_t>(size)) {}
  device::Exchange of(std::size_t rank) {
    return [this, rank](const std::string& mine, std::vector<std::string>* all) {
      told_[rank] = mine;
      barrier_.arrive_and_wait();
      *all = told_;
      barrier_.arrive_and_wait();
      return Status();
    };
  }

 private:
  std::vector<std::string> told_;
  std::barrier<> barrier_;
};

// Wires between the hosts of ranks that are threads, made when the first of them asks, as often as
// they ask.
class WireWorld {
 public:
  using Make = std::function<std::vector<std::shared_ptr<transport::Transport>>(std::size_t size)>;

  // By `make` where there is one.
  WireWorld(std::size_t size, bool over_tcp, Make make)
      : over_tcp_(over_tcp), make_(std::move(make)), wires_(size), ends_(size) {}

  device::Wires of(std::size_t rank) {
    return [this, rank](std::vector<std::shared_ptr<transport::Transport>>* wires) {
      const std::lock_guard<std::mutex> lock(making_);
      // Ranks ask in step: nobody asks again before all have what they asked for.
      if (asked_++ % wires_.size() == 0) make();
      wires->push_back(std::move(wires_[rank]));
      return Status();
    };
  }
  // Peers see what the kernel shows them of a killed process.
  void cut(std::size_t rank) {
    for (const UniqueFd& socket : ends_[rank]) ::shutdown(socket.get(), SHUT_RDWR);
  }

 private:
  template <typename Attach>
  void join(const Attach& attach) {
    for (std::size_t a = 0; a < wires_.size(); ++a) {
      for (std::size_t b = a + 1; b < wires_.size(); ++b) {
        SocketPair pair = unix_pair();
        ends_[a].push_back(duplicate(pair.near));
        ends_[b].push_back(duplicate(pair.far));
        attach(a, b, std::move(pair.near));
        attach(b, a, std::move(pair.far));
      }
    }
  }
  void make() {
    if (make_) {
      wires_ = make_(wires_.size());
    } else {
      over_tcp_ ? make_tcp() : make_memory();
    }
  }
  void make_tcp() {
    const auto size = static_cast<int>(wires_.size());
    std::vector<std::shared_ptr<transport::TcpTransport>> made;
    for (int rank = 0; rank < size; ++rank) {
      made.push_back(std::make_shared<transport::TcpTransport>(rank, size));
    }
    join([&](std::size_t one, std::size_t other, UniqueFd socket) {
      std::vector<UniqueFd> sockets;
      sockets.push_back(std::move(socket));
      const Status status = made[one]->attach(static_cast<int>(other), std::move(sockets), "there");
      CHECK(status.ok(), "%s", status.message().c_str());
    });
    std::copy(made.begin(), made.end(), wires_.begin());
  }
  void make_memory() {
    const auto size = static_cast<int>(wires_.size());
    std::vector<std::shared_ptr<transport::ShmTransport>> made;
    for (int rank = 0; rank < size; ++rank) made.push_back(make_shm(rank, size));
    join([&](std::size_t one, std::size_t other, UniqueFd socket) {
      attach_shm(*made[one], *made[other], static_cast<int>(other), std::move(socket));
    });
    std::copy(made.begin(), made.end(), wires_.begin());
  }

  bool over_tcp_;
  Make make_;
  std::mutex making_;
  std::size_t asked_ = 0;
  std::vector<std::shared_ptr<transport::Transport>> wires_;
  std::vector<std::vector<UniqueFd>> ends_;
};

// One rank with a stream of its own, as a thread of a program would have.
struct CudaRank {
  std::shared_ptr<const device::Gpu> gpu;
  std::unique_ptr<device::Communicator> communicator;
  Status opened;
  device::StreamHandle stream = nullptr;
  Status told;  // to the host, by the thread that watches
};

struct CudaOptions {
  std::uint32_t size = 2;
  std::vector<int> ordinals{};  // of devices, by rank; 0 where there are none
  Nanoseconds timeout = Nanoseconds{20'000'000'000};
  std::uint64_t memory_max = 2 << 20;
  std::vector<std::uint64_t> machines{};  // by rank; one for all where there are none
  bool over_tcp = false;                  // wires between them; otherwise shared memory
  std::vector<std::optional<device::Protocol>> only{};  // by rank; none where there are none
  WireWorld::Make wires{};                              // or these
  bool direct = true;                                   // network cards may use device memory
  std::size_t programs_max = 4096;
};

class CudaRanks {
 public:
  explicit CudaRanks(const CudaOptions& options)
      : ranks_(options.size), wires_(options.size, options.over_tcp, options.wires) {
    Table table(options.size);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < options.size; ++rank) {
      threads.emplace_back([&, rank] { open(options, rank, table); });
    }
    for (std::thread& one : threads) one.join();
  }
  CudaRanks(const CudaRanks&) = delete;
  CudaRanks& operator=(const CudaRanks&) = delete;
  // As programs do: all close, then all are gone.
  ~CudaRanks() {
    for (CudaRank& rank : ranks_) {
      if (rank.communicator != nullptr) rank.communicator->close();
    }
    for (CudaRank& rank : ranks_) rank.communicator.reset();
  }

  CudaRank& operator[](std::size_t rank) { return ranks_[rank]; }
  std::size_t size() const { return ranks_.size(); }
  WireWorld& wires() { return wires_; }

 private:
  void open(const CudaOptions& options, std::uint32_t number, Table& table) {
    CudaRank& rank = ranks_[number];
    rank.gpu = open_gpu(options.ordinals.empty() ? 0 : options.ordinals[number]);
    const device::Gpu::Current current(*rank.gpu);
    CUDA(stream_create(&rank.stream, device::kStreamNonBlocking));
    device::Options made;
    made.gpu = rank.gpu;
    made.membership.rank = number;
    made.membership.size = options.size;
    for (std::uint32_t one = 0; one < options.size; ++one) {
      made.membership.names.push_back("host:" + std::to_string(one));
    }
    made.membership.machine = options.machines.empty() ? 1 : options.machines[number];
    made.membership.wires = wires_.of(number);
    made.membership.process = 7;
    made.membership.memory_max = options.memory_max;
    if (!options.only.empty()) made.membership.only = options.only[number];
    made.membership.direct = options.direct;
    made.host.count = [](bool) {};
    made.host.look = [](const std::string&, bool) { return Status(); };
    made.host.fail = [&rank](const Status& status, const std::string&, double) {
      return rank.told = status;
    };
    made.clock = std::make_shared<SteadyClock>();
    made.timeout = options.timeout;
    made.programs_max = options.programs_max;
    rank.opened = device::Communicator::open(std::move(made), table.of(number), &rank.communicator);
  }

  std::vector<CudaRank> ranks_;
  WireWorld wires_;
};

// Device memory of one rank, with what the host sent there in its stream.
class CudaArray {
 public:
  CudaArray(CudaRank& rank, const DeviceMemory& content, device::StreamHandle stream)
      : rank_(rank), bytes_(content.bytes()) {
    const device::Gpu::Current current(*rank.gpu);
    CUDA(memory_allocate(&address_, bytes_ + 1));
    if (bytes_ == 0) return;
    DeviceMemory copy = content;
    CUDA(copy_to_device(address_, copy.data(), bytes_, stream));
  }
  ~CudaArray() {
    const device::Gpu::Current current(*rank_.gpu);
    CUDA(memory_free(address_));
  }
  CudaArray(const CudaArray&) = delete;
  CudaArray& operator=(const CudaArray&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  // Behind all that the stream holds.
  DeviceMemory read(device::StreamHandle stream) const {
    const device::Gpu::Current current(*rank_.gpu);
    DeviceMemory content(bytes_);
    if (bytes_ != 0) CUDA(copy_to_host(content.data(), address_, bytes_, stream));
    CUDA(stream_synchronize(stream));
    return content;
  }

 private:
  CudaRank& rank_;
  device::Address address_ = 0;
  std::size_t bytes_;
};

// A scenario's arrays on all ranks, and its requests.
class CudaCase {
 public:
  CudaCase(CudaRanks& ranks, const Scenario& one) : ranks_(ranks), one_(one) {
    buffers_ = make_buffers(one);
    for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
      CudaRank& mine = ranks[rank];
      const auto request = make_request(one, rank, buffers_[rank]);
      in_place_.push_back(request.input.data == request.output.data && request.input.bytes != 0);
      inputs_.push_back(std::make_unique<CudaArray>(mine, buffers_[rank].input, mine.stream));
      outputs_.push_back(std::make_unique<CudaArray>(mine, buffers_[rank].output, mine.stream));
    }
  }

  executor::CollectiveRequest request(std::uint32_t rank) {
    auto made = make_request(one_, rank, buffers_[rank]);
    made.output.data = outputs_[rank]->data();
    made.input.data = in_place_[rank] ? outputs_[rank]->data() : inputs_[rank]->data();
    return made;
  }
  Status launch(std::uint32_t rank) {
    return ranks_[rank].communicator->launch(request(rank), lanes(), ranks_[rank].stream);
  }
  std::uint32_t lanes() const {
    std::uint32_t most = 1;
    for (const auto& plan : one_.schedule->plans) {
      most = std::max<std::uint32_t>(most, plan->header().lane_count);
    }
    return most;
  }
  void launch_all() {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const Status status = launch(rank);
      CHECK(status.ok(), "%s: %s", one_.to_text().c_str(), status.message().c_str());
    }
  }
  DeviceMemory output(std::uint32_t rank) { return outputs_[rank]->read(ranks_[rank].stream); }
  // Every rank's result is what the host's engines make of the case.
  void check() {
    const std::uint32_t wrong = first_wrong();
    CHECK(wrong == ranks_.size(), "rank %u: %s", wrong, one_.to_text().c_str());
  }
  // The first rank whose result is another one; as many as there are ranks: none.
  std::uint32_t first_wrong() {
    const std::vector<Buffers> expected = run_on_host(one_);
    std::uint32_t first = static_cast<std::uint32_t>(ranks_.size());
    for (std::uint32_t rank = first; rank-- > 0;) {
      if (output(rank) != expected[rank].output) first = rank;
    }
    return first;
  }

 private:
  CudaRanks& ranks_;
  Scenario one_;
  std::vector<Buffers> buffers_;
  std::vector<bool> in_place_;
  std::vector<std::unique_ptr<CudaArray>> inputs_;
  std::vector<std::unique_ptr<CudaArray>> outputs_;
};

inline Scenario cuda_scenario(const std::string& schedule, std::uint32_t size, std::uint64_t count,
                              std::uint64_t seed = 1) {
  Scenario one;
  one.schedule = &find_schedule(schedule, size);
  one.dtype = DType::kInt32;
  one.counts.assign(one.schedule->plans[0]->header().block_count, count);
  one.seed = seed;
  return one;
}

}  // namespace pycoll::testing
